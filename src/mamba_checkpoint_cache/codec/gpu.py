"""The formats of reference.py fused in Triton: one launch for every layer and head of every slot, and no wait on the host."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mamba_checkpoint_cache.codec.call import Call
from mamba_checkpoint_cache.codec.gpu_kernels import compress_kernel, restore_kernel
from mamba_checkpoint_cache.codec.pivot import Int5PivotCodec, Int8PivotCodec
from mamba_checkpoint_cache.codec.reference import (
    MIN_AMAX,
    Int8Codec,
    Int16Codec,
    NoneCodec,
    TableCodec,
    copy_slots,
    empty_report,
)

COMPRESS_BLOCKS, RESTORE_BLOCKS = (128, 32), (32, 128)
"""The largest tile ``(d_v, d_k)`` that one program works on at a time."""

COMPRESS_OPTIONS: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}
RESTORE_OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
"""No fusion: a fused multiply-add rounds once where the reference rounds twice."""


class GpuNoneCodec(NoneCodec):
    """``none``: a copy per slot, and one launch for the report."""

    def _compress(self, call: Call) -> Tensor:
        copy_slots(call.state, call.state_rows, call.stored["state"], call.stored_rows)
        return _compress(call, None, None)


class GpuInt8Codec(Int8Codec):
    """``int8`` in one launch, in the order of the current stream."""

    def _compress(self, call: Call) -> Tensor:
        return _compress(call, call.stored["q"], call.stored["scale"])

    def _restore(self, call: Call) -> None:
        place = _place(call, *RESTORE_BLOCKS)
        grid = (_num_heads(call), _num_tiles(place, "K"), _num_tiles(place, "V"))
        with torch.cuda.device_of(call.state):  # type: ignore[no-untyped-call]
            restore_kernel[grid](call.state, call.stored["q"], call.stored["scale"], **place, **RESTORE_OPTIONS)


GPU_CODECS: dict[str, type[TableCodec]] = {
    codec.name: codec for codec in (GpuNoneCodec, Int16Codec, GpuInt8Codec, Int8PivotCodec, Int5PivotCodec)
}


def _compress(call: Call, q: Tensor | None, scale: Tensor | None) -> Tensor:
    """Each program reports on the channels of its tile: the parts are added up in an order that never changes."""
    place = _place(call, *COMPRESS_BLOCKS)
    grid = (_num_heads(call), _num_tiles(place, "K"))
    parts = empty_report(call, grid[1])
    limits = {"MIN_AMAX": MIN_AMAX, "LARGEST_SCALE": Int8Codec().largest_scale(call.state.dtype)}
    with torch.cuda.device_of(call.state):  # type: ignore[no-untyped-call]
        compress_kernel[grid](call.state, q, scale, parts, **place, **limits, **COMPRESS_OPTIONS)
    return parts.sum(-2)


def _num_heads(call: Call) -> int:
    return call.num_slots * call.state.shape[0] * call.state.shape[2]


def _place(call: Call, most_v: int, most_k: int) -> dict[str, Any]:
    """The arguments that say where the heads lie, and how they are cut into tiles."""
    num_layers, _, num_heads, d_v, d_k = call.state.shape
    state_rows, stored_rows = _send_rows(call) if call.num_slots > 1 else (None, None)
    return {
        "p_state_rows": state_rows,
        "p_stored_rows": stored_rows,
        "state_row": next(iter(call.state_rows), 0),
        "stored_row": next(iter(call.stored_rows), 0),
        "num_stored_rows": next(iter(call.stored.values())).shape[1],
        **dict(zip(("stride_layer", "stride_row", "stride_head", "stride_v", "stride_k"), call.state.stride(), strict=True)),
        "NUM_LAYERS": num_layers,
        "NUM_HEADS": num_heads,
        "D_V": d_v,
        "D_K": d_k,
        "BLOCK_V": min(_power_of_two(d_v), most_v),
        "BLOCK_K": min(_power_of_two(d_k), most_k),
    }


def _num_tiles(place: Mapping[str, Any], axis: str) -> int:
    num_tiles: int = math.ceil(place[f"D_{axis}"] / place[f"BLOCK_{axis}"])
    return num_tiles


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _send_rows(call: Call) -> Tensor:
    """The rows ``[2, num_slots]`` on the state's device, through pinned memory: the copy must not make the host wait."""
    rows = torch.tensor([list(call.state_rows), list(call.stored_rows)], dtype=torch.int64)
    return rows.pin_memory().to(call.state.device, non_blocking=True) if call.state.is_cuda else rows
