"""The contract for the Triton codecs. Run by test_codec_gpu.py in a process of its own, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from codec_contract import CodecContract, bits, fresh_numbers
from torch import Tensor

from mamba_checkpoint_cache.codec.gpu import GpuInt5PivotCodec, GpuInt8Codec, GpuInt8PivotCodec, GpuInt16Codec, GpuNoneCodec
from mamba_checkpoint_cache.codec.pivot import Int5PivotCodec, Int8PivotCodec, PivotCodec, rotate_back, signs
from mamba_checkpoint_cache.codec.reference import Int8Codec, Int16Codec, NoneCodec
from mamba_checkpoint_cache.state import StateSpec

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


def heads_at_the_edges() -> dict[str, Tensor]:
    """Heads in which all hangs on one bit, and no sum on its order; of so odd a size that their rotation only changes signs."""
    column = torch.rand(33, 1, generator=fresh_numbers())
    many = torch.zeros(33, 260)
    many[:, [5, 7, 130, 200]] = torch.cat([column, -column, -column, column], 1)
    steps = torch.arange(8, 16) / 2**11
    halves = (torch.arange(15) + 0.5)[:, None] * steps
    rests = torch.cat([15 * steps[None], -15 * steps[None], halves, -halves, 0 * steps[None]])
    predicted = (15 * (torch.arange(8, 16) + 0.5) / 256).expand(33, 8)
    return {
        "zeros": torch.zeros(33, 5),
        "equal channels": torch.cat([column / 2, column, -column], 1),
        "equal channels in two tiles": many,
        "halfway between two codes": torch.cat([torch.full((33, 1), 1.5), rests, predicted], 1),
    }


def assert_bytes_are_the_references(codec: PivotCodec, reference: PivotCodec, head: Tensor) -> None:
    results = []
    for each, device in ((codec, DEVICE), (reference, torch.device("cpu"))):
        state = head[None, None, None].to(device, copy=True)
        stored = each.allocate(StateSpec(1, 1, *head.shape), 1, device)
        each.compress(state, (0,), stored, (0,))
        each.restore(stored, (0,), state, (0,))
        results.append({name: bits(tensor) for name, tensor in (stored | {"restored": state}).items()})
    assert [name for name in results[0] if not torch.equal(results[0][name], results[1][name])] == []


@pytest.mark.parametrize("name", heads_at_the_edges())
@pytest.mark.parametrize(
    ("codec", "reference"),
    [(GpuInt8PivotCodec(), Int8PivotCodec()), (GpuInt5PivotCodec(), Int5PivotCodec())],
    ids=["int8", "int5"],
)
def test_edges(codec: PivotCodec, reference: PivotCodec, name: str) -> None:
    """The same choice between equals as the reference's, and the same side of what lies halfway."""
    head = heads_at_the_edges()[name]

    assert_bytes_are_the_references(codec, reference, signs(len(head))[:, None] * head)


def test_rotations_round_as_the_references() -> None:
    """The same bytes for a head that is predicted so well that the last bits of the rotation's sums are all that is left."""
    numbers = fresh_numbers()
    u = 2 * torch.randint(-8, 8, (64, 1), generator=numbers).index_fill(0, torch.tensor([0]), 7) + 1
    g = torch.randint(8, 16, (20,), generator=numbers) / 16
    noise = torch.rand(64, 20, generator=numbers) * 2.0**-20

    assert_bytes_are_the_references(GpuInt8PivotCodec(), Int8PivotCodec(), rotate_back((u * g + noise)[None])[0])
