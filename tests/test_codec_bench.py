"""The codec benchmark: that it compares like with like and reports every case; never how fast that was."""

from __future__ import annotations

import pytest
import torch

from mamba_checkpoint_cache.bench import codec as bench
from mamba_checkpoint_cache.codec import get_codec
from mamba_checkpoint_cache.state import StateSpec

TIMES = ("compress_ms", "restore_ms", "eager_compress_ms", "eager_restore_ms", "copy_ms")


def test_rows_have_the_public_keys() -> None:
    """One row per shape and dtype, in their order, with times that were measured."""
    rows = [row for row in bench.run({"small": (2, 2, 5, 7), "other": (1, 1, 8, 8)}, rounds=2)["rows"] if row["device"] == "cpu"]

    assert [(row["shape"], row["dtype"], row["format"]) for row in rows] == [
        ("small 2x2x5x7", "float32", "int8"),
        ("small 2x2x5x7", "bfloat16", "int8"),
        ("other 1x1x8x8", "float32", "int8"),
        ("other 1x1x8x8", "bfloat16", "int8"),
    ]
    assert all(list(row) == ["device", "shape", "dtype", "format", *TIMES] for row in rows)
    assert all(row[time] > 0 for row in rows for time in TIMES)


@pytest.mark.parametrize("dtype", bench.DTYPES.values(), ids=str)
def test_the_eager_formula_is_the_same_formula(dtype: torch.dtype) -> None:
    """What the codec is timed against stores and restores the same bytes."""
    spec, cpu, row = StateSpec(3, 2, 20, 30, dtype), torch.device("cpu"), torch.tensor([1])
    state = torch.randn(3, 2, 2, 20, 30).to(dtype)
    codec = get_codec("int8", cpu)
    stored, eager = codec.allocate(spec, 2, cpu), codec.allocate(spec, 2, cpu)
    restored, eagerly_restored = torch.zeros_like(state), torch.zeros_like(state)

    codec.compress(state, [1], stored, [1])
    bench.eager_compress(state, row, eager, row)
    codec.restore(stored, [1], restored, [1])
    bench.eager_restore(eager, row, eagerly_restored, row)

    assert all(torch.equal(stored[name], eager[name]) for name in stored)
    assert torch.equal(restored, eagerly_restored)
    assert bool(restored[:, 1].any())
