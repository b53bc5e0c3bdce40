"""Results as people read them."""

from __future__ import annotations

import pytest

from mamba_checkpoint_cache import tables

DEMO = {
    "model": "tiny hybrid",
    "codec": "int8",
    "requests": 1234,
    "prompt_tokens": 40_000,
    "reused_tokens": 30_000,
    "lost_tokens": 321,
    "checkpoints": {"stored": 300, "duplicate": 20, "skipped": {"all_locked": 3, "non_finite": 0, "exhausted": 1}},
    "evictions": {"forced": 17, "kv_pressure": 2},
    "bytes": {"occupied": 2**20, "native_equivalent": 3 * 2**30, "saved": 5 * 2**20},
    "relative_error": {"p50": 0.00512, "p95": 0.0071, "max": 0.0123},
    "drift": {
        "checks": {"ok": 9, "over_budget": 1, "failed": 0, "skipped": 4},
        "tokens": 80,
        "kl_mean_nats": 0.000312,
        "top1": 0.9875,
    },
    "latency_ms": {"hit_p50": 12.345, "miss_p50": None},
    "equal_memory": {
        "pool_bytes": 12 * 2**20,
        "none": {"slots": 18, "reuse_ratio": 0.412},
        "int8": {"slots": 64, "reuse_ratio": 0.757},
    },
}


def test_columns_align_numbers_right_and_text_left() -> None:
    """Numbers end, and text starts, in the same column on every line; no line ends in blanks."""
    table = tables.columns(["name", "n", "ms"], [["a", 1, 0.0123], ["long name", 12_345, None]])

    assert table.splitlines() == [
        "name            n     ms",
        "a               1  0.012",
        "long name  12,345      -",
    ]


def test_values_are_written_for_people() -> None:
    """Shapes, large counts, small and large floats, and absence each have their form."""
    cells = [[[36, 32, 128], 1_234_567, 1234.5678, 0.000123456, 0.0, "fp32"]]

    assert tables.columns(list("abcdef"), cells).splitlines()[1].split() == [
        "36x32x128",
        "1,234,567",
        "1,234.57",
        "0.00012",
        "0.00",
        "fp32",
    ]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0.00 MiB"), (2**30 - 1, "1,024.00 MiB"), (2**30, "1.00 GiB"), (1536 * 2**20, "1.50 GiB")]
)
def test_sizes_have_a_unit(count: int, text: str) -> None:
    """MiB below one GiB, GiB from there."""
    assert tables.size(count) == text


def test_the_demo_table_has_every_figure() -> None:
    """Tokens reused, memory saved, evictions, state error, latency, the comparison at equal bytes; only reasons that occurred."""
    table = tables.demo_table(DEMO)

    for figure in (
        "30,000 (75.0 %)",
        "321",
        "300 stored, 20 duplicate, 4 skipped (3 all_locked, 1 exhausted)",
        "17 forced, 2 kv_pressure",
    ):
        assert figure in table
    for figure in (
        "1.00 MiB occupied, 3.00 GiB native",
        "5.00 MiB",
        "p50 0.0051, p95 0.0071, max ≤ 0.012",
        "KL 0.00031 nats, same token 98.8 % (10 hits recomputed)",
        "hit p50 12.35 ms, miss p50 - ms",
    ):
        assert figure in table
    assert "in 12.00 MiB each" in table
    assert [line.split() for line in table.splitlines()[-2:]] == [["none", "18", "41.2", "%"], ["int8", "64", "75.7", "%"]]


def test_the_demo_table_of_an_empty_run() -> None:
    """A run without prompts divides by nothing, skipped nothing, and says that it saw nothing of drift."""
    table = tables.demo_table(
        DEMO
        | {"prompt_tokens": 0, "reused_tokens": 0, "checkpoints": {"stored": 0, "duplicate": 0, "skipped": {}}}
        | {"drift": {"checks": {"ok": 0, "skipped": 2}, "tokens": 0, "kl_mean_nats": None, "top1": None}}
    )

    assert "0 (0.0 %)" in table
    assert "0 skipped\n" in table
    assert "not observed: 0 ok, 2 skipped" in table


def test_the_reuse_table_compares_the_codecs() -> None:
    """One line per codec: slots, bytes per slot and the knee."""
    arms = {
        "none": {"slots": 10, "bytes_per_slot": 2**20, "knee": 9},
        "int8": {"slots": 38, "bytes_per_slot": 275_000, "knee": 35},
    }

    table = tables.reuse_table({"state_dtype": "fp32", "pool_bytes": 11 * 2**20, **arms, "curve": [[1, 0.9]]})

    assert "fp32 states, 11.00 MiB" in table
    assert [line.split() for line in table.splitlines()[-2:]] == [
        ["none", "10", "1,048,576", "9"],
        ["int8", "38", "275,000", "35"],
    ]


def test_the_reuse_table_shows_a_trace_if_there_is_one() -> None:
    """A replayed trace adds a line per pool size: slots and reused share, native and int8."""
    arm = {"slots": 10, "bytes_per_slot": 2**20, "knee": 9}
    row = {"pool_bytes": 8 * 2**30, "none": {"slots": 110, "reused_share": 0.125}, "int8": {"slots": 403, "reused_share": 0.375}}
    trace = {"model": "Qwen3-Next-80B-A3B", "requests": 12_031, "rows": [row]}

    table = tables.reuse_table({"state_dtype": "fp32", "pool_bytes": 2**20, "none": arm, "int8": arm, "trace": trace})

    assert "12,031 recorded requests, states of Qwen3-Next-80B-A3B" in table
    assert table.splitlines()[-1].split() == ["8.00", "GiB", "110", "0.12", "403", "0.38"]


def test_rows_share_one_header() -> None:
    """Rows with different keys are one table; what a row lacks is a dash."""
    table = tables.rows_table({"rows": [{"prompts": 1000, "match_us": 8.5}, {"prompts": 10_000, "insert_us": 40.0}]})

    assert [line.split() for line in table.splitlines()] == [
        ["prompts", "match_us", "insert_us"],
        ["1,000", "8.50", "-"],
        ["10,000", "-", "40.00"],
    ]
