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
        ("drift", _drift(result["drift"])),
        ("latency", f"hit p50 {_number(latency['hit_p50'])} ms, miss p50 {_number(latency['miss_p50'])} ms"),
    ]
    equal = result["equal_memory"]
    codecs = sorted((codec for codec in equal if codec != "pool_bytes"), key=lambda codec: equal[codec]["slots"])
    arms = [[codec, equal[codec]["slots"], f"{100 * equal[codec]['reuse_ratio']:.1f} %"] for codec in codecs]
    header = [f"in {size(equal['pool_bytes'])} each", "slots", "tokens reused"]
    return f"{pairs(facts)}\n\n{columns(header, arms)}"


def _drift(drift: Result) -> str:
    if not drift["tokens"]:
        return f"not observed: {_counts(drift['checks'])}"
    ended = drift["checks"]["ok"] + drift["checks"]["over_budget"]
    return f"KL {_number(drift['kl_mean_nats'])} nats, same token {100 * drift['top1']:.1f} % ({ended} hits recomputed)"


def eval_table(result: Result) -> str:
    """The verdict, the drift of each lossy codec by distance and hops, tasks, memory, noise floors, and notes."""
    verdict, noise = result["verdict"], result["noise"]
    facts = [
        ("model", result["model"]),
        ("verdict", f"{'within' if verdict['within'] else 'OVER'} the budget"),
        ("noise", f"mean KL {_number(noise['rechunk_kl'])} in other chunks, {_number(noise['bf16_kl'])} with bf16 checkpoints"),
    ]
    keys = ("codec", "task", "hops", "distance", "kl_mean", "kl_p95", "kl_p99", "top1", "relative_error", "worst_head")
    rows = [row for row in result["rows"] if row["codec"] != "none" or row["kl_mean"] != 0]
    native_slots = f"slots for {next(iter(result['capacity'].values()))['native_slots']} native"
    parts = [
        f"{pairs(facts)}\n\n{verdict['text']}",
        columns(
            ["codec", "task", "hops", "distance", "KL (nats)", "p95", "p99", "top-1", "state error", "worst head"],
            ([row[key] for key in keys] for row in rows),
        ),
        _by_codec(result["recall"], {"recall": "cached", "uncached": "uncached", "95 %": "ci"}),
        _by_codec(result["bits_per_byte"], {"bits per byte": "cached", "uncached": "uncached"}),
        _by_codec(
            result["divergence"], {"greedy texts": "prompts", "the same": "same", "shortest": "shortest", "of": "max_tokens"}
        ),
        _by_codec(
            result["capacity"],
            {"bytes per checkpoint": "bytes_per_checkpoint", "bits per element": "bits_per_element", native_slots: "slots"},
        ),
        *(_layers(codec, found) for codec, found in result["per_layer"].items()),
        "\n".join(f"- {note}" for note in result["notes"]),
    ]
    return "\n\n".join(part for part in parts if part)


def _layers(codec: str, found: Result) -> str:
    keys = {"layer": "layer", "model_layer": "in the model", "kl_mean": "KL (nats)", "share": "share", "bytes": "bytes more"}
    rows = ([row[key] for key in keys] for row in found["rows"])
    title = f"{codec} in one layer, the others exact; bytes more to keep that layer {found['keep']}"
    return f"{title}\n\n{columns(list(keys.values()), rows)}\n\n{found['suggestion']['text']}"


def _by_codec(figures: Mapping[str, Result], keys: Mapping[str, str]) -> str:
    rows = [[codec, *(_interval(figure[key]) for key in keys.values())] for codec, figure in figures.items()]
    return columns(["codec", *keys], rows) if rows else ""


def _interval(value: Any) -> Any:
    return " … ".join(map(_number, value)) if isinstance(value, list) else value


def drift_table(result: Result) -> str:
    """The bits of each format, and what it drifts: for itself, and against the baseline with an interval."""
    found: dict[tuple[str, str, str], list[Result]] = {}
    for ratio in result["ratios"]:
        found.setdefault((ratio["model"], ratio["task"], ratio["format"]), []).append(ratio)
    spans = [f"{ratio['tokens']} tokens after {ratio['hops']}" for ratio in next(iter(found.values()))]
    parts = [
        pairs([("prompts", f"{result['prompt_count']} of each task"), ("took", f"{result['seconds']:.0f} s")]),
        columns(
            ["bits per element at 128 x 128", "fp32", "bf16"],
            ([row["format"], row["bits_fp32_128"], row["bits_bf16_128"]] for row in result["formats"]),
        ),
        f"Mean KL of the {spans[0]} restore, and as a multiple of {result['baseline']}'s on the same prompts (95 % interval)",
        columns(
            ["model", "task", "format", "KL (nats)", *spans],
            (
                [*place, ratios[0]["kl_mean"], *map(_ratio, ratios)]
                for place, ratios in found.items()
                if any(ratio["kl_mean"] != 0 for ratio in ratios)
            ),
        ),
    ]
    return "\n\n".join(parts)


def _ratio(ratio: Result) -> str:
    interval = "" if ratio["ratio_ci"] is None else f" ({_interval(ratio['ratio_ci'])})"
    return "-" if ratio["ratio"] is None else f"{_number(ratio['ratio'])}x{interval}"


def reuse_table(result: Result) -> str:
    """The knee of each codec: the distinct prefixes at which the reused share falls under half; and a replayed trace."""
    found = {codec: arm for codec, arm in result.items() if isinstance(arm, Mapping) and "knee" in arm}
    arms = [[codec, *(arm[key] for key in ("slots", "bytes_per_slot", "knee"))] for codec, arm in found.items()]
    title = f"{result['state_dtype']} states, {size(result['pool_bytes'])} for each pool"
    knees = f"{title}\n\n{columns(['codec', 'slots', 'bytes per slot', 'knee (prefixes)'], arms)}"
    return f"{knees}\n\n{_trace_table(result['trace'])}" if "trace" in result else knees


def _trace_table(trace: Result) -> str:
    codecs = [name for name in trace["rows"][0] if name != "pool_bytes"]
    lines = [
        [size(row["pool_bytes"]), *(cell for codec in codecs for cell in (row[codec]["slots"], row[codec]["reused_share"]))]
        for row in trace["rows"]
    ]
    title = f"{trace['requests']:,} recorded requests, states of {trace['model']}"
    headers = [header for codec in codecs for header in (f"{codec} slots", "share reused")]
    return f"{title}\n\n{columns(['pool', *headers], lines)}"


def sampling_table(result: Result) -> str:
    """The throughput with sampled checks against that without, and what the checks found."""
    interval = "" if result["ratio_ci"] is None else " ({:.3f} … {:.3f})".format(*result["ratio_ci"])
    facts = [
        ("model", result["model"]),
        ("codec", result["codec"]),
        ("requests", f"{result['requests']:,} for each engine, in {result['rounds']} rounds"),
        ("tokens per CPU second", f"{result['tokens_per_cpu_second']['off']:,.0f} without checks"),
        ("", f"{result['tokens_per_cpu_second']['sampled']:,.0f} with {100 * result['drift_rate']:g} % of hits sampled"),
        ("ratio", f"{result['ratio']:.3f}{interval}"),
        ("checks", _counts(result["checks"])),
        ("KL", f"{_number(result['kl_mean'])} nats, the mean of {result['positions']:,} positions"),
    ]
    return pairs(facts)


def telemetry_table(result: Result) -> str:
    """What telemetry costs in each arm, in a commit and at a scrape, and whether series grow."""
    operation, ratio = result["operation_us"], result["commit_ratio"]
    facts = [
        *((f"match, {arm}", f"{operation[arm]:.1f} us") for arm in operation),
        *((f"commit, {shape}", f"{ratio[shape]:.3f} of its time without telemetry") for shape in ratio),
        ("scrape", f"{result['scrape_ms']:.1f} ms, {result['scrape_bytes']:,} bytes"),
        ("series", f"{result['series_before']:,} before, {result['series_after']:,} after random requests"),
    ]
    return pairs(facts)


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
