"""The codec benchmark: that it compares like with like and reports every case; never how fast that was."""

from __future__ import annotations

import pytest
import torch

from mamba_checkpoint_cache.bench import codec as bench
from mamba_checkpoint_cache.codec import CODEC_NAMES, get_codec
from mamba_checkpoint_cache.state import StateSpec

OWN = ("compress_ms", "restore_ms", "compress_ratio", "restore_ratio")
SHARED = ("eager_compress_ms", "eager_restore_ms", "copy_ms")


def test_rows_have_the_public_keys() -> None:
    """One row per shape, dtype and format, in their order, with times that were measured."""
    rows = [row for row in bench.run({"small": (2, 2, 5, 7), "other": (1, 1, 8, 8)}, rounds=2)["rows"] if row["device"] == "cpu"]

    assert [(row["shape"], row["dtype"], row["format"]) for row in rows] == [
        (shape, dtype, name)
        for shape in ("small 2x2x5x7", "other 1x1x8x8")
        for dtype in ("float32", "bfloat16")
        for name in CODEC_NAMES
        if name != "none"
    ]
    assert all(list(row) == ["device", "shape", "dtype", "format", *OWN, *SHARED] for row in rows)
    assert all(row[time] > 0 for row in rows for time in (*OWN, *SHARED))


def test_formats_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round times every operation of every format once; figures are medians without the first rounds, ratios to int8's."""
    formats, operations = len(bench.FORMATS), 3 + 2 * len(bench.FORMATS)
    called: list[int] = []

    def timer(operation: object) -> float:
        called.append(id(operation))
        turn, place = divmod(len(called) - 1, operations)
        return (1 + place) * (1000.0 if turn < bench.WARM_UP else (1.0, 2.0, 9.0)[turn - bench.WARM_UP])

    monkeypatch.setattr(bench, "_milliseconds", timer)
    monkeypatch.setattr(bench, "DTYPES", {"float32": torch.float32})
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: False)

    rows = bench.run({"small": (1, 1, 4, 4)}, rounds=3)["rows"]

    turns = [called[i : i + operations] for i in range(0, len(called), operations)]
    assert len(turns) == bench.WARM_UP + 3
    assert len(set(turns[0])) == operations
    assert all(turn == turns[0] for turn in turns)
    assert [(row["eager_compress_ms"], row["eager_restore_ms"], row["copy_ms"]) for row in rows] == [(2, 4, 6)] * formats
    assert [(row["compress_ms"], row["restore_ms"]) for row in rows] == [(8 + 4 * i, 10 + 4 * i) for i in range(formats)]
    peer = rows[bench.FORMATS.index("int8")]
    for row in rows:
        assert row["compress_ratio"] == row["compress_ms"] / peer["compress_ms"]
        assert row["restore_ratio"] == row["restore_ms"] / peer["restore_ms"]


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
