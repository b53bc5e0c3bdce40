"""The contract for the Triton codecs. Run by test_codec_gpu.py in a process of its own, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from codec_contract import CodecContract

from mamba_checkpoint_cache.codec.gpu import GpuInt5PivotCodec, GpuInt8Codec, GpuInt8PivotCodec, GpuInt16Codec, GpuNoneCodec
from mamba_checkpoint_cache.codec.pivot import Int5PivotCodec, Int8PivotCodec
from mamba_checkpoint_cache.codec.reference import Int8Codec, Int16Codec, NoneCodec

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
"""The interpreter computes with numpy, which warns of what a GPU does silently: numbers overflow before they are clamped."""

SIZES = ((130, 36), (63, 1), (1, 133))


@pytest.fixture(autouse=True)
def casts_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter rounds to bfloat16 towards zero, and widens its subnormals wrongly. A GPU does neither."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def as_on_a_gpu(values: Any, from_dtype: Any, to_dtype: Any, mode: Any) -> Any:
        if (from_dtype, to_dtype) == (tl.float32, tl.bfloat16):
            return torch.from_numpy(np.array(values)).bfloat16().view(torch.int16).numpy().view(np.uint16)
        if (from_dtype, to_dtype) == (tl.bfloat16, tl.float32):
            return values.astype(np.uint32) << 16
        return convert(values, from_dtype, to_dtype, mode)

    monkeypatch.setattr(interpreter, "_convert_float", as_on_a_gpu)


class TestInt8(CodecContract):
    codec, reference = GpuInt8Codec(), Int8Codec()
    device, sizes = DEVICE, SIZES


class TestNone(CodecContract):
    codec, reference = GpuNoneCodec(), NoneCodec()
    device, sizes = DEVICE, SIZES[1:]


class TestInt16(CodecContract):
    codec, reference = GpuInt16Codec(), Int16Codec()
    device, sizes = DEVICE, SIZES[1:]


class TestInt8Pivot(CodecContract):
    codec, reference = GpuInt8PivotCodec(), Int8PivotCodec()
    device, sizes = DEVICE, ((80, 9), (130, 36))


class TestInt5Pivot(CodecContract):
    codec, reference = GpuInt5PivotCodec(), Int5PivotCodec()
    device, sizes = DEVICE, ((63, 9),)
