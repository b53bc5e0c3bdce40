"""A StateSpec from the ``config.json`` of a hybrid language model, without importing transformers.

Field names and defaults are those of the transformers configuration classes. Every family fits one shape: heads of
``[d_v, d_k]``, and a conv window over the values of all heads plus the keys and queries of ``key_groups`` groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from mamba_checkpoint_cache.state import SideSpec, StateSpec

MAMBA1_HEAD_CHANNELS = 128
"""Mamba-1 channels have no heads: as many as this one, or the largest power of two that divides them, count as a head."""

_LINEAR_LAYERS = {"linear_attention", "mamba", "hybrid"}
_KIMI_SECTION = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
    "kda_layers": "kda_layers",
}


class ConfigError(ValueError):
    """A model configuration that no StateSpec can be read from; the message names the field and what was expected."""


class _Geometry(NamedTuple):
    num_layers: int
    num_heads: int
    d_v: int
    d_k: int
    key_groups: int
    conv_kernel: int


class _Fields:
    """The fields of a config, checked as they are read; one that is absent has its family's default."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, int]) -> None:
        self._fields = {**defaults, **config}

    def number(self, name: str, otherwise: int | None = None) -> int:
        value = self._fields.get(name)
        if value is None or value == "auto":
            value = otherwise
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{name} must be a whole number, 0 or more, got {value!r}")
        return value

    def listed(self, name: str) -> list[Any] | str | None:
        value = self._fields.get(name)
        if value is not None and not isinstance(value, list | str):
            raise ConfigError(f"{name} must be a list, got {value!r}")
        return value

    def linear_layers(self, otherwise: int) -> int:
        """How many layers have a recurrent state: ``otherwise`` where the config lists no layer types."""
        types = self.listed("layer_types") or self.listed("layers_block_type")
        return sum(layer in _LINEAR_LAYERS for layer in types) if types else otherwise


def _gated_delta_net(fields: _Fields) -> _Geometry:
    num_layers, interval = fields.number("num_hidden_layers"), max(1, fields.number("full_attention_interval"))
    return _Geometry(
        num_layers=fields.linear_layers(num_layers - num_layers // interval),
        num_heads=fields.number("linear_num_value_heads"),
        d_v=fields.number("linear_value_head_dim"),
        d_k=fields.number("linear_key_head_dim"),
        key_groups=fields.number("linear_num_key_heads"),
        conv_kernel=fields.number("linear_conv_kernel_dim"),
    )


def _kimi_delta_attention(fields: _Fields) -> _Geometry:
    num_layers, kda_layers = fields.number("num_hidden_layers"), fields.listed("kda_layers")
    num_heads, head_dim = fields.number("linear_num_heads"), fields.number("linear_head_dim")
    return _Geometry(
        num_layers=fields.linear_layers(num_layers - max(0, num_layers - 1) // 4 if kda_layers is None else len(kda_layers)),
        num_heads=num_heads,
        d_v=head_dim,
        d_k=head_dim,
        key_groups=num_heads,
        conv_kernel=fields.number("linear_conv_kernel_dim"),
    )


def _nemotron_h(fields: _Fields) -> _Geometry:
    return _Geometry(
        num_layers=fields.linear_layers((fields.listed("hybrid_override_pattern") or "").count("M")),
        num_heads=fields.number("mamba_num_heads"),
        d_v=fields.number("mamba_head_dim"),
        d_k=fields.number("ssm_state_size"),
        key_groups=fields.number("mamba_n_groups", fields.number("n_groups")),
        conv_kernel=fields.number("mamba_d_conv", fields.number("conv_kernel")),
    )


def _mamba2(fields: _Fields) -> _Geometry:
    return _Geometry(
        num_layers=fields.number("num_hidden_layers"),
        num_heads=fields.number("num_heads"),
        d_v=fields.number("head_dim"),
        d_k=fields.number("state_size"),
        key_groups=fields.number("n_groups"),
        conv_kernel=fields.number("conv_kernel"),
    )


def _mamba2_in_hybrid(fields: _Fields) -> _Geometry:
    attention = fields.listed("attn_layer_indices") or []
    num_heads = fields.number("mamba_n_heads")
    inner = fields.number("mamba_d_ssm", fields.number("mamba_expand") * fields.number("hidden_size"))
    return _Geometry(
        num_layers=fields.linear_layers(fields.number("num_hidden_layers") - len(attention)),
        num_heads=num_heads,
        d_v=fields.number("mamba_d_head", inner // max(1, num_heads)),
        d_k=fields.number("mamba_d_state"),
        key_groups=fields.number("mamba_n_groups"),
        conv_kernel=fields.number("mamba_d_conv"),
    )


def _zamba2(fields: _Fields) -> _Geometry:
    num_heads = fields.number("n_mamba_heads")
    return _Geometry(
        num_layers=fields.linear_layers(fields.number("num_hidden_layers")),
        num_heads=num_heads,
        d_v=fields.number("mamba_expand") * fields.number("hidden_size") // max(1, num_heads),
        d_k=fields.number("mamba_d_state"),
        key_groups=fields.number("mamba_ngroups"),
        conv_kernel=fields.number("mamba_d_conv"),
    )


def _mamba1_heads(num_layers: int, inner: int, d_state: int, conv_kernel: int) -> _Geometry:
    channels = math.gcd(inner, MAMBA1_HEAD_CHANNELS)
    return _Geometry(num_layers, inner // max(1, channels), channels, d_state, key_groups=0, conv_kernel=conv_kernel)


def _mamba1(fields: _Fields) -> _Geometry:
    expanded = fields.number("expand") * fields.number("hidden_size")
    return _mamba1_heads(
        num_layers=fields.number("num_hidden_layers"),
        inner=fields.number("intermediate_size", expanded),
        d_state=fields.number("state_size"),
        conv_kernel=fields.number("conv_kernel"),
    )


def _jamba(fields: _Fields) -> _Geometry:
    period, offset = max(1, fields.number("attn_layer_period")), fields.number("attn_layer_offset")
    return _mamba1_heads(
        num_layers=sum(layer % period != offset for layer in range(fields.number("num_hidden_layers"))),
        inner=fields.number("mamba_expand") * fields.number("hidden_size"),
        d_state=fields.number("mamba_d_state"),
        conv_kernel=fields.number("mamba_d_conv"),
    )


_GDN = {
    "full_attention_interval": 4,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_conv_kernel_dim": 4,
}
_MAMBA1 = {"num_hidden_layers": 32, "hidden_size": 768, "expand": 2, "state_size": 16, "conv_kernel": 4}
_PARALLEL = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "mamba_expand": 2,
    "mamba_n_heads": 128,
    "mamba_d_state": 256,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
}
_FAMILIES: dict[str, tuple[Callable[[_Fields], _Geometry], dict[str, int]]] = {
    "qwen3_next": (_gated_delta_net, _GDN | {"num_hidden_layers": 48}),
    "qwen3_5": (_gated_delta_net, _GDN | {"num_hidden_layers": 32}),
    "qwen3_5_moe": (_gated_delta_net, _GDN | {"num_hidden_layers": 40}),
    "kimi_linear": (
        _kimi_delta_attention,
        {"num_hidden_layers": 27, "linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4},
    ),
    "nemotron_h": (
        _nemotron_h,
        {"mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4},
    ),
    "falcon_h1": (_mamba2_in_hybrid, _PARALLEL | {"mamba_d_ssm": 1024}),
    "bamba": (_mamba2_in_hybrid, _PARALLEL),
    "granitemoehybrid": (_mamba2_in_hybrid, _PARALLEL),
    "zamba2": (
        _zamba2,
        {
            "num_hidden_layers": 54,
            "hidden_size": 2560,
            "mamba_expand": 2,
            "n_mamba_heads": 8,
            "mamba_d_state": 64,
            "mamba_ngroups": 1,
            "mamba_d_conv": 4,
        },
    ),
    "mamba2": (
        _mamba2,
        {"num_hidden_layers": 64, "num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8, "conv_kernel": 4},
    ),
    "mamba": (_mamba1, _MAMBA1),
    "falcon_mamba": (_mamba1, _MAMBA1),
    "jamba": (
        _jamba,
        {
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "mamba_expand": 2,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
        },
    ),
}
MODEL_TYPES = tuple(sorted(_FAMILIES))
"""The values of ``model_type`` that can be read; a nested ``text_config`` may say ``<model_type>_text``."""


def _flattened(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's own fields, with those that Kimi-Linear keeps in a section of their own."""
    text = config.get("text_config")
    fields = dict(text if isinstance(text, Mapping) else config)
    section = fields.get("linear_attn_config")
    if isinstance(section, Mapping):
        fields |= {_KIMI_SECTION[name]: value for name, value in section.items() if name in _KIMI_SECTION}
    return fields


def _geometry(config: Mapping[str, Any]) -> _Geometry:
    model_type = config.get("model_type")
    if str(model_type).removesuffix("_text") not in _FAMILIES:
        known = ", ".join(MODEL_TYPES)
        raise ConfigError(f"model_type {model_type!r} is not a known hybrid with linear-attention layers; known: {known}")
    read, defaults = _FAMILIES[str(model_type).removesuffix("_text")]
    geometry = read(_Fields(config, defaults))
    if geometry.num_layers < 1:
        raise ConfigError(f"this {model_type} has no linear-attention layers, so there is no recurrent state to checkpoint")
    if geometry.conv_kernel < 1:
        raise ConfigError(f"the conv kernel must be at least 1 wide, got {geometry.conv_kernel}")
    return geometry


def _shard(geometry: _Geometry, ranks: int) -> _Geometry:
    """What one of ``ranks`` tensor-parallel ranks holds; key groups fewer than the ranks are replicated."""
    heads, groups = geometry.num_heads, geometry.key_groups
    if ranks < 1 or heads % ranks or (groups % ranks and ranks % groups):
        raise ConfigError(
            f"tensor parallelism of {ranks} must divide {heads} heads and divide (or be a multiple of) {groups} key groups"
        )
    return geometry._replace(num_heads=heads // ranks, key_groups=-(-groups // ranks))


def spec_from_config(
    config: Mapping[str, Any],
    *,
    state_dtype: torch.dtype = torch.float32,
    conv_dtype: torch.dtype = torch.bfloat16,
    tensor_parallel: int = 1,
) -> StateSpec:
    """The recurrent state that one tensor-parallel rank keeps for each request of the model that ``config`` describes.

    ``config`` is the parsed ``config.json``; a nested ``text_config`` is followed. The conv window is counted as engines
    keep it, one column narrower than the kernel: side tensor ``conv``, ``[channels, kernel - 1]``.

    Raises:
        ConfigError: if ``model_type`` is unknown, a field is no number, no layer is linear, or the heads can't be shared out.
    """
    shard = _shard(_geometry(_flattened(config)), tensor_parallel)
    channels = shard.num_heads * shard.d_v + 2 * shard.key_groups * shard.d_k
    try:
        side = SideSpec("conv", (channels, shard.conv_kernel - 1), conv_dtype)
        return StateSpec(shard.num_layers, shard.num_heads, shard.d_v, shard.d_k, state_dtype, (side,))
    except ValueError as error:
        raise ConfigError(str(error)) from error
