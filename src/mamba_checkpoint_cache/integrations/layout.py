"""Where a transformers model keeps its state, found out by running the model itself for a few tokens."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from mamba_checkpoint_cache.model_configs import MAMBA1_HEAD_CHANNELS
from mamba_checkpoint_cache.state import STATE_DTYPES, SideSpec, StateSpec

CONV = "conv"
"""The name of the side tensor that holds the conv windows."""

_CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
_STATE_LAYERS = (LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)
_KV_LAYERS = (DynamicLayer, LinearAttentionAndFullAttentionLayer)
_DRY_RUN_TOKENS = 3


class UnsupportedModelError(ValueError):
    """A model whose state can't be kept in slots, or that can't be continued from one; the message says why."""


class StateOrder(Enum):
    """The order in which a model keeps the axes of one layer's recurrent state."""

    KEYS_FIRST = "[heads, d_k, d_v]"
    VALUES_FIRST = "[heads, d_v, d_k]"
    CHANNELS = "[channels, d_k]"

    def to_spec(self, native: Tensor, spec: StateSpec) -> Tensor:
        """The model's tensor seen as ``[…, num_heads, d_v, d_k]``, without a copy."""
        if self is StateOrder.KEYS_FIRST:
            return native.transpose(-1, -2)
        return native.view(*native.shape[: -len(self.native_shape(spec))], *spec.shape[1:])

    def to_native(self, state: Tensor, spec: StateSpec) -> Tensor:
        """A tensor ``[…, num_heads, d_v, d_k]`` seen as the model orders it, without a copy."""
        if self is StateOrder.KEYS_FIRST:
            return state.transpose(-1, -2)
        return state.view(*state.shape[:-3], *self.native_shape(spec))

    def native_shape(self, spec: StateSpec) -> tuple[int, ...]:
        """The shape of one layer of one slot as the model keeps it."""
        _, heads, d_v, d_k = spec.shape
        if self is StateOrder.CHANNELS:
            return (heads * d_v, d_k)
        return (heads, d_k, d_v) if self is StateOrder.KEYS_FIRST else (heads, d_v, d_k)


@dataclass(frozen=True, slots=True)
class KvSpec:
    """One token's keys and values in one attention layer: ``(heads, dim)`` each."""

    layer: int
    key_shape: tuple[int, int]
    value_shape: tuple[int, int]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Layout:
    """What a model keeps per request.

    ``spec``: the recurrent and conv state, in the core's terms. ``order``: how the model orders its axes. ``state_layers``: the
    model's layers that hold it, in the order of the layer axis of ``spec``. ``kv``: its attention layers; a layer can be in both.
    ``cache_argument``: the parameter of the model's forward that takes a cache.
    """

    spec: StateSpec
    order: StateOrder
    state_layers: tuple[int, ...]
    kv: tuple[KvSpec, ...]
    cache_argument: str


def discover_layout(model: PreTrainedModel) -> Layout:
    """Run ``model`` on three tokens and read its layout off the cache that it filled.

    Raises:
        UnsupportedModelError: if the model fills no cache of the library's own layers, or fills it with something other than one
            recurrent state (and conv window) per layer, all of one shape, and keys and values that grow with each token.
    """
    cache, argument = _dry_run(model)
    holders = {index: layer for index, layer in enumerate(layers_of(cache)) if _holds_state(layer)}
    recurrent = [_only_state(index, layer, "recurrent_states") for index, layer in holders.items()]
    conv = [_only_state(index, layer, "conv_states") for index, layer in holders.items() if layer.conv_states[0] is not None]
    if not recurrent:
        raise UnsupportedModelError(f"{_name(model)} keeps no recurrent state in its cache, so there is nothing to checkpoint")
    if len(conv) not in {0, len(recurrent)}:
        raise UnsupportedModelError(f"{len(conv)} of {len(recurrent)} recurrent layers have a conv window: expected all or none")
    order = _state_order(model, recurrent[0])
    return Layout(
        spec=_state_spec(order, recurrent, conv),
        order=order,
        state_layers=tuple(holders),
        kv=tuple(_kv_spec(index, layer) for index, layer in enumerate(layers_of(cache)) if _holds_kv(layer)),
        cache_argument=argument,
    )


def layers_of(cache: DynamicCache) -> list[Any]:
    """The layers of ``cache``, untyped: the classes that they are declared as have no attributes in common."""
    return cache.layers


def _name(model: PreTrainedModel) -> str:
    return type(model).__name__


@torch.no_grad()
def _dry_run(model: PreTrainedModel) -> tuple[DynamicCache, str]:
    """A cache that the model has filled, and the argument that took it: told by its effect, as a wrong one may be ignored."""
    tokens = torch.arange(1, 1 + _DRY_RUN_TOKENS, device=model.device)[None]
    parameters = inspect.signature(model.forward).parameters
    for argument in (name for name in _CACHE_ARGUMENTS if name in parameters):
        cache = DynamicCache(config=model.config)
        try:
            model(input_ids=tokens, use_cache=True, **{argument: cache})
        except Exception as error:
            raise UnsupportedModelError(f"{_name(model)} does not run with the library's own cache layers: {error}") from error
        if any(_holds_state(layer) or _holds_kv(layer) for layer in layers_of(cache)):
            return cache, argument
    raise UnsupportedModelError(f"{_name(model)} filled no cache passed as {' or '.join(_CACHE_ARGUMENTS)}")


def _holds_state(layer: Any) -> bool:
    states = (*getattr(layer, "recurrent_states", {}).values(), *getattr(layer, "conv_states", {}).values())
    return any(state is not None for state in states)


def _holds_kv(layer: Any) -> bool:
    return getattr(layer, "keys", None) is not None


def _only_state(index: int, layer: Any, kind: str) -> Tensor:
    states: dict[int, Tensor | None] = getattr(layer, kind)
    if type(layer) not in _STATE_LAYERS or len(states) != 1:
        raise UnsupportedModelError(f"layer {index}, a {type(layer).__name__}, has {len(states)} {kind}: expected one")
    if (state := states[0]) is None:
        raise UnsupportedModelError(f"layer {index} keeps a conv window but no recurrent state, so there is nothing to compress")
    return state


def _state_order(model: PreTrainedModel, recurrent: Tensor) -> StateOrder:
    """How the axes are ordered. Shapes can't tell; a wrong answer costs the codec accuracy, and nothing else.

    Delta-rule layers (GDN, KDA), told by the name their configs give to the conv width, keep keys first. Mamba-1 has channels
    instead of heads. Anything else is taken to be ordered as Mamba-2 is.
    """
    if recurrent.dim() == 3:
        return StateOrder.CHANNELS
    if recurrent.dim() != 4:
        raise UnsupportedModelError(f"expected a recurrent state of 3 or 4 axes, got {tuple(recurrent.shape)}")
    delta_rule = hasattr(model.config.get_text_config(decoder=True), "linear_conv_kernel_dim")
    return StateOrder.KEYS_FIRST if delta_rule else StateOrder.VALUES_FIRST


def _state_spec(order: StateOrder, recurrent: Sequence[Tensor], conv: Sequence[Tensor]) -> StateSpec:
    shape, dtype = _alike("recurrent states", recurrent)
    if dtype not in STATE_DTYPES:
        raise UnsupportedModelError(f"the recurrent state is {dtype}: expected one of {STATE_DTYPES}")
    if order is StateOrder.CHANNELS:
        d_v = math.gcd(shape[0], MAMBA1_HEAD_CHANNELS)
        heads, d_k = shape[0] // d_v, shape[1]
    else:
        heads, first, second = shape
        d_v, d_k = (second, first) if order is StateOrder.KEYS_FIRST else (first, second)
    side = (SideSpec(CONV, *_alike("conv windows", conv)),) if conv else ()
    return StateSpec(len(recurrent), heads, d_v, d_k, dtype, side)


def _alike(what: str, tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], torch.dtype]:
    """The shape without its batch axis, and the dtype, that all of ``tensors`` have."""
    kinds = {(tuple(tensor.shape[1:]), tensor.dtype, tensor.device) for tensor in tensors}
    if len(kinds) > 1:
        raise UnsupportedModelError(
            f"the layers' {what} differ: expected one shape, dtype and device, got {sorted(map(str, kinds))}"
        )
    shape, dtype, _ = kinds.pop()
    return shape, dtype


def _kv_spec(index: int, layer: Any) -> KvSpec:
    if type(layer) not in _KV_LAYERS or layer.keys.shape[-2] != _DRY_RUN_TOKENS:
        raise UnsupportedModelError(f"layer {index} is a {type(layer).__name__}: only full attention goes on from any depth")
    (_, key_heads, _, key_dim), (_, value_heads, _, value_dim) = layer.keys.shape, layer.values.shape
    return KvSpec(index, (key_heads, key_dim), (value_heads, value_dim), layer.keys.dtype)
