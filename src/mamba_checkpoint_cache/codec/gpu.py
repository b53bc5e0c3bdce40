"""The formats of reference.py fused in Triton: one launch for every layer and head of every slot, and no wait on the host."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mamba_checkpoint_cache.codec.call import Call
from mamba_checkpoint_cache.codec.gpu_kernels import compress_kernel, restore_kernel
from mamba_checkpoint_cache.codec.gpu_pivot_head import Code, Head
from mamba_checkpoint_cache.codec.gpu_pivot_kernels import pivot_compress_kernel, pivot_restore_kernel
from mamba_checkpoint_cache.codec.pivot import Int5PivotCodec, Int8PivotCodec, PivotCodec, precision_of
from mamba_checkpoint_cache.codec.reference import (
    MIN_AMAX,
    Int8Codec,
    Int16Codec,
    NoneCodec,
    SymmetricCodec,
    TableCodec,
    copy_slots,
    empty_report,
)

COMPRESS_BLOCKS, RESTORE_BLOCKS = (128, 32), (32, 128)
"""The largest tile ``(d_v, d_k)`` that one program works on at a time."""
PIVOT_COMPRESS_BLOCKS, PIVOT_RESTORE_BLOCKS = (128, 128), (32, 128)
"""The same for the pivot formats, where one program compresses a whole head: it needs all of it to know the pivot."""

COMPRESS_OPTIONS: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}
RESTORE_OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
PIVOT_COMPRESS_OPTIONS: dict[str, Any] = {"num_warps": 16, "enable_fp_fusion": False}
PIVOT_RESTORE_OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
"""No fusion: a fused multiply-add rounds once where the reference rounds twice."""


class GpuNoneCodec(NoneCodec):
    """``none``: a copy per slot, and one launch for the report."""

    def _compress(self, call: Call) -> Tensor:
        copy_slots(call.state, call.state_rows, call.stored["state"], call.stored_rows)
        return _compress(call, None, None, Int8Codec())


class GpuSymmetricCodec(SymmetricCodec):
    """Symmetric integers in one launch, in the order of the current stream."""

    def _compress(self, call: Call) -> Tensor:
        return _compress(call, call.stored["q"], call.stored["scale"], self)

    def _restore(self, call: Call) -> None:
        place = _place(call) | _tiles(call, *RESTORE_BLOCKS)
        grid = (_num_heads(call), _num_tiles(place, "K"), _num_tiles(place, "V"))
        with torch.cuda.device_of(call.state):  # type: ignore[no-untyped-call]
            restore_kernel[grid](call.state, call.stored["q"], call.stored["scale"], **place, **RESTORE_OPTIONS)


class GpuInt8Codec(GpuSymmetricCodec, Int8Codec):
    """``int8``."""


class GpuInt16Codec(GpuSymmetricCodec, Int16Codec):
    """``int16``."""


class GpuPivotCodec(PivotCodec):
    """A pivot format in one launch, in the order of the current stream."""

    def _compress(self, call: Call) -> Tensor:
        report = empty_report(call)
        head = self._head(call, *PIVOT_COMPRESS_BLOCKS)
        with torch.cuda.device_of(call.state):  # type: ignore[no-untyped-call]
            pivot_compress_kernel[(_num_heads(call),)](
                call.state, *self._pointers(call), report, **_slots(call), H=head, **PIVOT_COMPRESS_OPTIONS
            )
        return report

    def _restore(self, call: Call) -> None:
        head = self._head(call, *PIVOT_RESTORE_BLOCKS)
        grid = (_num_heads(call), math.ceil(head.d_k / head.block_k), math.ceil(head.d_v / head.block_v))
        with torch.cuda.device_of(call.state):  # type: ignore[no-untyped-call]
            pivot_restore_kernel[grid](call.state, *self._pointers(call), **_slots(call), H=head, **PIVOT_RESTORE_OPTIONS)

    def _head(self, call: Call, most_v: int, most_k: int) -> Head:
        """What the kernels are compiled for: anew for each way in which states lie in memory."""
        *_, d_v, d_k = call.state.shape
        *_, stride_v, stride_k = call.state.stride()
        fine = precision_of(call.state.dtype)
        return Head(
            d_v=d_v,
            d_k=d_k,
            stride_v=stride_v,
            stride_k=stride_k,
            block_v=max(8, min(_power_of_two(d_v), most_v)),  # eight rows share a byte of int5's fifth bits
            block_k=max(2, min(_power_of_two(d_k), most_k)),  # two channels a byte of coarse gains
            levels=self.levels,
            limit=torch.finfo(call.state.dtype).max,
            pivot_bits=fine.pivot_bits,
            gain=Code.of(fine.gain),
        )

    @staticmethod
    def _pointers(call: Call) -> list[Tensor | None]:
        stored = call.stored
        q = [stored["low"], stored["high"]] if "low" in stored else [stored["q"], None]
        return [*q, *(stored[name] for name in ("exponent", "pivot", "gain", "scale"))]


class GpuInt8PivotCodec(GpuPivotCodec, Int8PivotCodec):
    """``int8-pivot``."""


class GpuInt5PivotCodec(GpuPivotCodec, Int5PivotCodec):
    """``int5-pivot``."""


GPU_CODECS: dict[str, type[TableCodec]] = {
    codec.name: codec for codec in (GpuNoneCodec, GpuInt16Codec, GpuInt8Codec, GpuInt8PivotCodec, GpuInt5PivotCodec)
}


def _compress(call: Call, q: Tensor | None, scale: Tensor | None, codec: SymmetricCodec) -> Tensor:
    """Each program reports on the channels of its tile: the parts are added up in an order that never changes."""
    place = _place(call) | _tiles(call, *COMPRESS_BLOCKS)
    grid = (_num_heads(call), _num_tiles(place, "K"))
    parts = empty_report(call, grid[1])
    limits = {"MIN_AMAX": MIN_AMAX, "LARGEST_SCALE": codec.largest_scale(call.state.dtype), "LEVELS": codec.levels}
    with torch.cuda.device_of(call.state):  # type: ignore[no-untyped-call]
        compress_kernel[grid](call.state, q, scale, parts, **place, **limits, **COMPRESS_OPTIONS)
    return parts.sum(-2)


def _num_heads(call: Call) -> int:
    return call.num_slots * call.state.shape[0] * call.state.shape[2]


def _slots(call: Call) -> dict[str, Any]:
    """The arguments that say where the heads of the slots lie."""
    num_layers, _, num_heads, _, _ = call.state.shape
    state_rows, stored_rows = _send_rows(call) if call.num_slots > 1 else (None, None)
    return {
        "p_state_rows": state_rows,
        "p_stored_rows": stored_rows,
        "state_row": next(iter(call.state_rows), 0),
        "stored_row": next(iter(call.stored_rows), 0),
        "num_stored_rows": next(iter(call.stored.values())).shape[1],
        **dict(zip(("stride_layer", "stride_row", "stride_head"), call.state.stride(), strict=False)),
        "NUM_LAYERS": num_layers,
        "NUM_HEADS": num_heads,
    }


def _place(call: Call) -> dict[str, Any]:
    """The same, and how a head lies."""
    *_, d_v, d_k = call.state.shape
    *_, stride_v, stride_k = call.state.stride()
    return {**_slots(call), "stride_v": stride_v, "stride_k": stride_k, "D_V": d_v, "D_K": d_k}


def _tiles(call: Call, most_v: int, most_k: int) -> dict[str, int]:
    """How a head is cut into tiles."""
    *_, d_v, d_k = call.state.shape
    return {"BLOCK_V": min(_power_of_two(d_v), most_v), "BLOCK_K": min(_power_of_two(d_k), most_k)}


def _num_tiles(place: Mapping[str, Any], axis: str) -> int:
    num_tiles: int = math.ceil(place[f"D_{axis}"] / place[f"BLOCK_{axis}"])
    return num_tiles


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _send_rows(call: Call) -> Tensor:
    """The rows ``[2, num_slots]`` on the state's device, through pinned memory: the copy must not make the host wait."""
    rows = torch.tensor([list(call.state_rows), list(call.stored_rows)], dtype=torch.int64)
    return rows.pin_memory().to(call.state.device, non_blocking=True) if call.state.is_cuda else rows
