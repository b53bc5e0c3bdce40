"""Codecs: a recurrent state to compressed bytes and back, in one pass over the data."""

from __future__ import annotations

import torch

from mamba_checkpoint_cache.codec.base import Codec
from mamba_checkpoint_cache.codec.cpu import CPU_CODECS
from mamba_checkpoint_cache.codec.layered import layered, parse_choice
from mamba_checkpoint_cache.codec.pivot import Int5PivotCodec, Int8PivotCodec
from mamba_checkpoint_cache.codec.reference import Int8Codec, Int16Codec, NoneCodec

FORMATS = {codec.name: codec for codec in (NoneCodec, Int16Codec, Int8Codec, Int8PivotCodec, Int5PivotCodec)}
"""Every format by its name, in plain torch: its definition."""
CODEC_NAMES = tuple(FORMATS)
BASELINE = Int8Codec.name
"""The peer's format, which others are measured against."""
DEFAULT_CODEC = Int8PivotCodec.name
"""The format with the least drift among those that take no more bytes than int8."""


def check_codec(name: str) -> None:
    """Raise :class:`ValueError` unless ``name`` is a format, or a format for each layer that some state could have."""
    parse_choice(name, CODEC_NAMES)


def get_codec(name: str, device: torch.device, num_layers: int | None = None) -> Codec:
    """The codec called ``name``, for tensors on ``device``.

    ``name`` is a format, or a format for each layer: see :mod:`mamba_checkpoint_cache.codec.layered`. The latter asks for
    ``num_layers``, the recurrent layers of the states. The codec's own name is the canonical one: equal for equal choices.

    Raises:
        ValueError: if no format has this name, or the choice is written otherwise, names a layer twice or one that is not there.
    """
    choice = parse_choice(name, CODEC_NAMES)
    if not choice.exceptions:
        return _plain(choice.default, device)
    if num_layers is None:
        raise ValueError(f"codec {name!r} chooses by layer: pass num_layers, the number of recurrent layers")
    plain = {known: _plain(known, device) for known in choice.formats}
    return layered([plain[known] for known in choice.by_layer(num_layers)])


def _plain(name: str, device: torch.device) -> Codec:
    """The fastest codec of a format for ``device``: fused for the CPU or the GPU, else in plain torch."""
    if device.type == "cpu":
        return CPU_CODECS[name]()
    if device.type == "cuda":
        from mamba_checkpoint_cache.codec.gpu import GPU_CODECS  # Triton is not everywhere

        return GPU_CODECS[name]()
    return FORMATS[name]()


__all__ = ["BASELINE", "CODEC_NAMES", "DEFAULT_CODEC", "Codec", "check_codec", "get_codec"]
