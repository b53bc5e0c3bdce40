"""The formats of reference.py fused for the CPU: one call into compiled code for every layer and head of every slot."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from mamba_checkpoint_cache.codec.call import Call
from mamba_checkpoint_cache.codec.cpu_build import load_kernels
from mamba_checkpoint_cache.codec.reference import Int8Codec, NoneCodec, TableCodec, copy_slots, empty_report, largest_scale
from mamba_checkpoint_cache.state import StateSpec

SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
STRIDES = ("stride_layer", "stride_row", "stride_head", "stride_v", "stride_k")
POINTERS = ("q", "scale", "report", "state_rows", "stored_rows")
COUNTS = ("num_slots", "num_layers", "num_heads", "d_v", "d_k", "num_stored_rows", "num_threads")


class Job(ctypes.Structure):
    """The arguments of the compiled code: ``Job`` of cpu_kernels.cpp, field by field."""

    _fields_ = (
        ("state", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in STRIDES),
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in COUNTS),
        ("largest_scale", ctypes.c_float),
    )


class CpuCodec(TableCodec):
    """What the fused formats share. Where the kernels can't be compiled, they do what their reference does."""

    def allocate(self, spec: StateSpec, num_rows: int, device: torch.device) -> dict[str, Tensor]:
        """The compressed tensors ``[num_layers, num_rows, …]`` by name, zeroed."""
        if device.type == "cpu":
            load_kernels()  # now, lest the first commit wait for a compiler
        return super().allocate(spec, num_rows, device)


class CpuNoneCodec(CpuCodec, NoneCodec):
    """``none``: a copy, and a second pass over it for the report."""

    def _compress(self, call: Call) -> Tensor:
        if load_kernels() is None:
            return super()._compress(call)
        copy_slots(call.state, call.state_rows, call.stored["state"], call.stored_rows)
        return _run("measure", call)


class CpuInt8Codec(CpuCodec, Int8Codec):
    """``int8`` in one pass over the state, with no temporary larger than a head per thread."""

    def _compress(self, call: Call) -> Tensor:
        return super()._compress(call) if load_kernels() is None else _run("compress", call)

    def _restore(self, call: Call) -> None:
        if load_kernels() is None:
            super()._restore(call)
        else:
            _run("restore", call)


def _run(operation: str, call: Call) -> Tensor:
    """Run ``operation`` on as many threads as torch uses, while other Python threads go on; returns the report."""
    num_layers, _, num_heads, d_v, d_k = call.state.shape
    state_rows, stored_rows = torch.tensor([list(call.state_rows), list(call.stored_rows)], dtype=torch.int64)
    report = empty_report(call)
    tensors = {"report": report, "state_rows": state_rows, "stored_rows": stored_rows}
    tensors |= {name: call.stored.get(name, report) for name in ("q", "scale")}  # "none" has neither: not touched
    num_stored_rows = next(iter(call.stored.values())).shape[1]
    counts = (call.num_slots, num_layers, num_heads, d_v, d_k, num_stored_rows, torch.get_num_threads())
    job = Job(
        state=call.state.data_ptr(),
        **dict(zip(STRIDES, call.state.stride(), strict=True)),
        **{name: tensors[name].data_ptr() for name in POINTERS},
        **dict(zip(COUNTS, counts, strict=True)),
        largest_scale=largest_scale(call.state.dtype),
    )
    getattr(load_kernels(), f"{operation}_{SUFFIXES[call.state.dtype]}")(ctypes.byref(job))
    return report
