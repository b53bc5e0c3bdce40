"""How long one state takes to compress and to restore: each format, int8's formula in eager torch, and a plain copy."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor

from mamba_checkpoint_cache.codec import CODEC_NAMES, Codec, get_codec
from mamba_checkpoint_cache.codec.reference import Int8Codec
from mamba_checkpoint_cache.serving.progress import Advance, progress
from mamba_checkpoint_cache.state import StateSpec

Shape = tuple[int, int, int, int]
Operations = dict[str, Callable[[], object]]
"""By the figure that they are timed for."""

SHAPES: dict[str, Shape] = {
    "Qwen3-Next": (36, 32, 128, 128),
    "Nemotron-3-Super": (40, 128, 64, 128),
    "Kimi-Linear": (20, 32, 128, 128),
    "Jamba-Mini": (28, 64, 128, 16),
}
"""``(num_layers, num_heads, d_v, d_k)``; Jamba's 8192 channels are 64 heads of 128."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FORMATS = tuple(name for name in CODEC_NAMES if name != "none")
BASELINE = Int8Codec.name
"""The format whose times all others are compared with."""
ROW, NUM_ROWS, WARM_UP = 1, 2, 2


def run(shapes: Mapping[str, Shape] | None = None, rounds: int = 11) -> dict[str, Any]:
    """Rows of ``device``, ``shape``, ``dtype``, ``format``, and medians over ``rounds`` in milliseconds for one state.

    ``compress_ms`` and ``restore_ms`` are the codec's; ``compress_ratio`` and ``restore_ratio`` what they are of int8's codec, on
    the same device and as fused as that; ``eager_compress_ms`` and ``eager_restore_ms`` those of the int8 formula as plain torch
    operations; ``copy_ms`` is ``copy_`` from one preallocated native state to another. All formats and these three take turns:
    whatever else the machine does falls on all of them alike. Measured on the CPU, and on the GPU where there is one.
    """
    cases = [
        (device, name, shape, dtype)
        for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else []))
        for name, shape in (SHAPES if shapes is None else shapes).items()
        for dtype in DTYPES
    ]
    rows: list[dict[str, Any]] = []
    with progress("rounds", len(cases) * (rounds + WARM_UP)) as advance:
        for case in cases:
            rows += _measure(*case, rounds, advance)
    return {"rows": rows}


def eager_compress(source: Tensor, source_rows: Tensor, stored: dict[str, Tensor], stored_rows: Tensor) -> None:
    """The int8 formula, an operation at a time: what an engine does that has no fused codec."""
    values = source[:, source_rows].float()
    amax = values.abs().amax(dim=-2, keepdim=True).clamp(min=1e-8)
    scale = (amax / 127).to(stored["scale"].dtype)
    stored["q"][:, stored_rows] = (values / scale.float()).round().clamp(-127, 127).to(torch.int8)
    stored["scale"][:, stored_rows] = scale


def eager_restore(stored: dict[str, Tensor], stored_rows: Tensor, target: Tensor, target_rows: Tensor) -> None:
    """The way back, an operation at a time."""
    values = stored["q"][:, stored_rows].float() * stored["scale"][:, stored_rows].float()
    target[:, target_rows] = values.to(target.dtype)


def _measure(device_type: str, name: str, shape: Shape, dtype: str, rounds: int, advance: Advance) -> list[dict[str, Any]]:
    """A row for each format."""
    device, spec = torch.device(device_type), StateSpec(*shape, DTYPES[dtype])
    num_layers, *head = shape
    source = torch.randn(num_layers, NUM_ROWS, *head, dtype=spec.dtype, device=device)
    target = torch.zeros_like(source)
    plain = _plain_operations(spec, source, target)
    coded = {name: _codec_operations(get_codec(name, device), spec, source, target) for name in FORMATS}
    operations = {(name, key): operation for name, keys in {"": plain, **coded}.items() for key, operation in keys.items()}
    timer = _cuda_milliseconds if device.type == "cuda" else _milliseconds
    times = []
    for _ in range(rounds + WARM_UP):
        times.append({key: timer(operation) for key, operation in operations.items()})
        advance(1)
    medians = {key: median(turn[key] for turn in times[WARM_UP:]) for key in operations}
    case = {"device": device_type, "shape": f"{name} {'x'.join(map(str, shape))}", "dtype": dtype}
    shared = {key: medians["", key] for key in plain}
    return [case | {"format": name} | _figures(medians, name) | shared for name in FORMATS]


def _codec_operations(codec: Codec, spec: StateSpec, source: Tensor, target: Tensor) -> Operations:
    stored = codec.allocate(spec, NUM_ROWS, source.device)
    return {
        "compress_ms": lambda: codec.compress(source, (ROW,), stored, (ROW,)),
        "restore_ms": lambda: codec.restore(stored, (ROW,), target, (ROW,)),
    }


def _plain_operations(spec: StateSpec, source: Tensor, target: Tensor) -> Operations:
    stored, rows = Int8Codec().allocate(spec, NUM_ROWS, source.device), torch.tensor([ROW], device=source.device)
    return {
        "eager_compress_ms": lambda: eager_compress(source, rows, stored, rows),
        "eager_restore_ms": lambda: eager_restore(stored, rows, target, rows),
        "copy_ms": lambda: target[:, ROW].copy_(source[:, ROW]),
    }


def _figures(medians: Mapping[tuple[str, str], float], name: str) -> dict[str, float]:
    times = {key: medians[name, key] for key in ("compress_ms", "restore_ms")}
    return times | {key.replace("_ms", "_ratio"): value / medians[BASELINE, key] for key, value in times.items()}


def _milliseconds(operation: Callable[[], object]) -> float:
    begin = time.perf_counter()
    operation()
    return (time.perf_counter() - begin) * 1e3


def _cuda_milliseconds(operation: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    operation()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))
