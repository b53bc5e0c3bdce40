"""Codecs: a recurrent state to compressed bytes and back, in one pass over the data."""

from __future__ import annotations

import torch

from mamba_checkpoint_cache.codec.base import Codec
from mamba_checkpoint_cache.codec.cpu import CpuInt8Codec, CpuNoneCodec
from mamba_checkpoint_cache.codec.reference import Int8Codec, NoneCodec

CODEC_NAMES = ("none", "int8")


def get_codec(name: str, device: torch.device) -> Codec:
    """The fastest codec of this format for tensors on ``device``: fused for the CPU or the GPU, else in plain torch.

    Raises:
        ValueError: if no format has this name.
    """
    if name not in CODEC_NAMES:
        raise ValueError(f"unknown codec {name!r}, expected one of {', '.join(CODEC_NAMES)}")
    lossless = name == "none"
    if device.type == "cpu":
        return CpuNoneCodec() if lossless else CpuInt8Codec()
    if device.type == "cuda":
        from mamba_checkpoint_cache.codec.gpu import GpuInt8Codec, GpuNoneCodec  # Triton is not everywhere

        return GpuNoneCodec() if lossless else GpuInt8Codec()
    return NoneCodec() if lossless else Int8Codec()


__all__ = ["CODEC_NAMES", "Codec", "get_codec"]
