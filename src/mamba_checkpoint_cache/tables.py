"""The results of commands as plain text tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]


def plan_table(result: Result) -> str:
    """Bytes and slots of a plan, native against compressed."""
    layers, heads, d_v, d_k = result["state_shape"]
    channels, width = result["conv_shape"]
    facts = [
        ("model", result["model"]),
        ("state", f"{layers} layers of {heads} x {d_v} x {d_k} {result['state_dtype']}"),
        ("conv", f"{layers} layers of {channels} x {width} {result['conv_dtype']}"),
        ("memory", size(result["memory_bytes"])),
    ]
    native = ["native", result["native_bytes"] / 2**20, result["native_slots"]]
    stored = [result["codec"], result["checkpoint_bytes"] / 2**20, result["checkpoint_slots"]]
    return f"{pairs(facts)}\n\n{columns(['checkpoint', 'MiB per slot', 'slots'], [native, stored])}"


def demo_table(result: Result) -> str:
    """What a demo run reused, saved, evicted and lost in accuracy."""
    checkpoints, stored, error, latency = (result[key] for key in ("checkpoints", "bytes", "relative_error", "latency_ms"))
    share = 100 * result["reused_tokens"] / max(1, result["prompt_tokens"])
    facts = [
        ("model", result["model"]),
        ("codec", result["codec"]),
        ("requests", f"{result['requests']:,}"),
        ("prompt tokens", f"{result['prompt_tokens']:,}"),
        ("  reused", f"{result['reused_tokens']:,} ({share:.1f} %)"),
        ("  lost", f"{result['lost_tokens']:,} (in the tree, but no checkpoint to continue from)"),
        (
            "checkpoints",
            f"{checkpoints['stored']:,} stored, {checkpoints['duplicate']:,} duplicate, {_skipped(checkpoints['skipped'])}",
        ),
        ("evictions", _counts(result["evictions"])),
        ("memory", f"{size(stored['occupied'])} occupied, {size(stored['native_equivalent'])} native"),
        ("  saved", size(stored["saved"])),
        ("state error", f"p50 {_number(error['p50'])}, p95 {_number(error['p95'])}, max ≤ {_number(error['max'])} (relative)"),
        ("latency", f"hit p50 {_number(latency['hit_p50'])} ms, miss p50 {_number(latency['miss_p50'])} ms"),
    ]
    equal = result["equal_memory"]
    arms = [[codec, equal[codec]["slots"], f"{100 * equal[codec]['reuse_ratio']:.1f} %"] for codec in ("none", "int8")]
    header = [f"in {size(equal['pool_bytes'])} each", "slots", "tokens reused"]
    return f"{pairs(facts)}\n\n{columns(header, arms)}"


def reuse_table(result: Result) -> str:
    """The knee of each codec: the distinct prefixes at which the reused share falls under half; and a replayed trace."""
    arms = [[codec, *(result[codec][key] for key in ("slots", "bytes_per_slot", "knee"))] for codec in ("none", "int8")]
    title = f"{result['state_dtype']} states, {size(result['pool_bytes'])} for each pool"
    knees = f"{title}\n\n{columns(['codec', 'slots', 'bytes per slot', 'knee (prefixes)'], arms)}"
    return f"{knees}\n\n{_trace_table(result['trace'])}" if "trace" in result else knees


def _trace_table(trace: Result) -> str:
    lines = [
        [
            size(row["pool_bytes"]),
            *(cell for codec in ("none", "int8") for cell in (row[codec]["slots"], row[codec]["reused_share"])),
        ]
        for row in trace["rows"]
    ]
    title = f"{trace['requests']:,} recorded requests, states of {trace['model']}"
    return f"{title}\n\n{columns(['pool', 'native slots', 'share reused', 'int8 slots', 'share reused'], lines)}"


def rows_table(result: Result) -> str:
    """The ``rows`` of a benchmark, one line each."""
    rows: Sequence[Result] = result["rows"]
    header = list(dict.fromkeys(key for row in rows for key in row))
    return columns(header, ([row.get(key) for key in header] for row in rows))


def pairs(facts: Iterable[tuple[str, str]]) -> str:
    """Lines of a name and a value."""
    facts = list(facts)
    width = max(len(name) for name, _ in facts)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in facts)


def columns(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Aligned columns under a header: text to the left, numbers to the right."""
    rows = [list(row) for row in rows]
    cells = [list(header), *([_number(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numeric = [all(isinstance(cell, int | float | None) for cell in column) for column in zip(*rows, strict=True)]
    aligned = [
        [f"{cell:{'>' if right else '<'}{width}}" for cell, width, right in zip(line, widths, numeric, strict=True)]
        for line in cells
    ]
    return "\n".join("  ".join(line).rstrip() for line in aligned)


def size(count: int) -> str:
    """Bytes as people read them."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.2f} MiB"


def _number(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return "x".join(map(str, value))
    if isinstance(value, float):
        return f"{value:,.2f}" if abs(value) >= 1 or not value else f"{value:.2g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


def _skipped(reasons: Mapping[str, int]) -> str:
    given = {reason: count for reason, count in reasons.items() if count}
    return f"{sum(given.values()):,} skipped" + (f" ({_counts(given)})" if given else "")
