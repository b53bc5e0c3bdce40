"""The formats of reference.py fused for the CPU: one call into compiled code for every layer and head of every slot."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from mamba_checkpoint_cache.codec.call import Call
from mamba_checkpoint_cache.codec.cpu_build import load_kernels
from mamba_checkpoint_cache.codec.pivot import Int5PivotCodec, Int8PivotCodec
from mamba_checkpoint_cache.codec.reference import (
    Int8Codec,
    Int16Codec,
    NoneCodec,
    SymmetricCodec,
    TableCodec,
    copy_slots,
    empty_report,
)
from mamba_checkpoint_cache.state import StateSpec

SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
STRIDES = ("stride_layer", "stride_row", "stride_head", "stride_v", "stride_k")
MAX_STORED = 6
COUNTS = ("num_slots", "num_layers", "num_heads", "d_v", "d_k", "num_stored_rows", "num_threads")


class Job(ctypes.Structure):
    """The arguments of the compiled code: ``Job`` of cpu_common.h, field by field."""

    _fields_ = (
        ("state", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in STRIDES),
        ("stored", ctypes.c_void_p * MAX_STORED),
        ("report", ctypes.c_void_p),
        ("state_rows", ctypes.c_void_p),
        ("stored_rows", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in COUNTS),
        ("largest_scale", ctypes.c_float),
    )


class CpuCodec(TableCodec):
    """Runs the kernels of its format. Where they can't be compiled, it does what its definition does."""

    def allocate(self, spec: StateSpec, num_rows: int, device: torch.device) -> dict[str, Tensor]:
        """The compressed tensors ``[num_layers, num_rows, …]`` by name, zeroed."""
        if device.type == "cpu":
            load_kernels()  # now, lest the first commit wait for a compiler
        return super().allocate(spec, num_rows, device)

    def _compress(self, call: Call) -> Tensor:
        return super()._compress(call) if load_kernels() is None else self._run("compress", call)

    def _restore(self, call: Call) -> None:
        if load_kernels() is None:
            super()._restore(call)
        else:
            self._run("restore", call)

    def _run(self, operation: str, call: Call) -> Tensor:
        """Run ``operation`` on as many threads as torch uses, while other Python threads go on; returns the report."""
        num_layers, _, num_heads, d_v, d_k = call.state.shape
        state_rows, stored_rows = torch.tensor([list(call.state_rows), list(call.stored_rows)], dtype=torch.int64)
        report = empty_report(call)
        names = self.fields(num_heads, d_v, d_k, call.state.dtype)
        num_stored_rows = next(iter(call.stored.values())).shape[1]
        counts = (call.num_slots, num_layers, num_heads, d_v, d_k, num_stored_rows, torch.get_num_threads())
        job = Job(
            state=call.state.data_ptr(),
            **dict(zip(STRIDES, call.state.stride(), strict=True)),
            stored=(ctypes.c_void_p * MAX_STORED)(*(call.stored[name].data_ptr() for name in names)),
            report=report.data_ptr(),
            state_rows=state_rows.data_ptr(),
            stored_rows=stored_rows.data_ptr(),
            **dict(zip(COUNTS, counts, strict=True)),
            largest_scale=self.largest_scale(call.state.dtype) if isinstance(self, SymmetricCodec) else 0.0,
        )
        kernel = f"{operation}_{self.name.replace('-', '_')}_{SUFFIXES[call.state.dtype]}"
        getattr(load_kernels(), kernel)(ctypes.byref(job))
        return report


class CpuNoneCodec(CpuCodec, NoneCodec):
    """``none``: a copy, and a second pass over it for the report."""

    def _compress(self, call: Call) -> Tensor:
        if load_kernels() is not None:
            copy_slots(call.state, call.state_rows, call.stored["state"], call.stored_rows)
        return super()._compress(call)

    def _restore(self, call: Call) -> None:
        copy_slots(call.stored["state"], call.stored_rows, call.state, call.state_rows)


class CpuInt8Codec(CpuCodec, Int8Codec):
    """``int8`` in one pass over the state, with no temporary larger than a head per thread."""


class CpuInt16Codec(CpuCodec, Int16Codec):
    """``int16``, likewise."""


class CpuInt8PivotCodec(CpuCodec, Int8PivotCodec):
    """``int8-pivot``, likewise."""


class CpuInt5PivotCodec(CpuCodec, Int5PivotCodec):
    """``int5-pivot``, likewise."""


CPU_CODECS: dict[str, type[TableCodec]] = {
    codec.name: codec for codec in (CpuNoneCodec, CpuInt16Codec, CpuInt8Codec, CpuInt8PivotCodec, CpuInt5PivotCodec)
}
