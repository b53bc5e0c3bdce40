"""Memory saved against accuracy drift: whether compression is worth what it costs. For those who chose the codec."""

from __future__ import annotations

from dashboards import queries as q
from dashboards.look import NEUTRAL, high_is_bad, low_is_bad
from dashboards.page import Page
from dashboards.panels import Column, Panel, lines, number, rows_of, scatter, spread, state, timeline
from mamba_checkpoint_cache.drift.budget import DriftBudget

NEARLY = 0.5
"""Of a ceiling: from there on it is near."""
NATS = "si: nats"
"""The blank keeps the n from being read as nano."""
GUARD_STATES = (("normal", "green"), ("native", "orange"), ("stopped", "red"))
EACH = "{{cache}} on {{instance}}"
ERROR, WORST = {"scope": "state"}, {"scope": "worst_head"}

_OCCUPIED = q.series("bytes", pool="checkpoint", kind="occupied")
_NATIVE = q.series("bytes", pool="checkpoint", kind="native_equivalent")
_GUARD = f"{q.series('guard_mode', mode='native')} + ignoring (mode) 2 * {q.series('guard_mode', mode='stopped')}"


def _saved(by: str = "") -> str:
    return f"{q.total(_NATIVE, by)} - {q.total(_OCCUPIED, by)}"


def _times(by: str = "") -> str:
    return q.ratio(q.total(_NATIVE, by), q.total(_OCCUPIED, by))


def _agreement(by: str = "") -> str:
    return q.share("top1_agreement_total", by=by, window=q.SAMPLED, agreed="yes")


def _error(by: str) -> str:
    return q.quantile(0.95, "relative_error", by=by, window=q.SAMPLED, **ERROR)


def _kl(by: str) -> str:
    return q.mean("logit_kl_nats", by=by, window=q.SAMPLED)


def _ceiling(kind: str, by: str) -> str:
    """What the drift budget of each cache allows; without a guard, what a budget allows by default."""
    default = f"{DriftBudget().ceilings[kind]} + 0 * max by ({by}) ({q.series('info')})"
    return f"(max by ({by}) ({q.series('drift_budget', kind=kind)}) > 0 or {default})"


def _used(measured: str, kind: str) -> str:
    """How much of a ceiling is used up, by cache."""
    return q.ratio(f"({measured})", _ceiling(kind, q.CACHE))


def _named(expression: str) -> str:
    """With the name of the point that it is; without caches whose guard is trying a codec on states that it stores otherwise."""
    normal = f"{q.with_codec(expression)} unless on ({q.CACHE}) {q.series('guard_mode', mode='normal')} == 0"
    return f'label_join({normal}, "series", " ", "cache", "codec")'


def _now() -> list[Panel]:
    return [
        number(
            "How much memory is saved now?",
            "What the stored checkpoints would take uncompressed, less what they take. 0 where the codec is none or nothing is "
            "stored. If it fell: look for a guard that went to native, or for a cache that was flushed.",
            _saved(),
            unit="bytes",
            limits=((None, "text"), (1, "green")),
            empty="no cache",
        ),
        number(
            "How many times as many checkpoints fit?",
            "Capacity gained: checkpoints in the memory that one uncompressed would take. About 3.1 to 3.8 for fp32 states, "
            "1.7 to 1.9 for bf16, 1 without a codec. If it is lower than planned: the states' side tensors aren't compressed, "
            "see `plan`.",
            _times(),
            unit="suffix:×",
            limits=((None, "text"), (1.5, "green")),
            empty="nothing stored",
        ),
        number(
            "How much of the error budget do states use?",
            "Relative error that 95 % of the compressions of the last 15 minutes stayed under, as a share of what the drift "
            "budget allows, of the worst cache; in native mode, of the guard's trials. If it nears 100 %: follow the runbook.",
            f"max({_used(_error(q.CACHE), 'relative_error')})",
            unit="percentunit",
            limits=high_is_bad(NEARLY, 1),
            empty="nothing compressed",
            runbooks="DriftAboveCeiling",
        ),
        number(
            "How much of the KL budget do next tokens use?",
            "Mean KL divergence between restored and recomputed runs, sampled over the last 15 minutes, as a share of what the "
            "cache's drift budget allows, of the worst cache. If it nears 100 %: follow the runbook.",
            f"max({_used(_kl(q.CACHE), 'kl_nats')})",
            unit="percentunit",
            limits=high_is_bad(NEARLY, 1),
            empty="not sampled",
            runbooks="DriftAboveCeiling",
        ),
        number(
            "Is the likeliest token the same?",
            "Share of the sampled positions of the last 15 minutes at which restored and recomputed runs agree, of the worst "
            "cache. If it fell while the KL divergence didn't rise, near ties flipped; if both are bad, it is drift: follow the "
            "runbook.",
            f"min({_agreement(q.CACHE)})",
            unit="percentunit",
            limits=low_is_bad(0.95, 0.98),
            empty="not sampled",
            runbooks="DriftAboveCeiling",
        ),
        state(
            "Does the guard let the codec run?",
            "The worst mode of the chosen caches. native: states are stored uncompressed, fewer fit. stopped: nothing is "
            "stored. If it isn't normal: the guard saw drift over the budget; the runbook says how to find out why.",
            f"max({_GUARD})",
            GUARD_STATES,
            empty="no guard",
            runbooks="GuardDegraded",
        ),
    ]


def _memory() -> list[Panel]:
    return [
        lines(
            "How much memory has been saved over time?",
            "Bytes saved by each cache, one on top of the other. If a part falls to 0: a flush, a restart, or a guard that took "
            "the codec out of service; see the last row.",
            {EACH: _saved("instance, cache")},
            unit="bytes",
            stacked=True,
        ),
        lines(
            "What would the checkpoints take uncompressed?",
            "The distance between the two lines is what is saved; pool is what the tensors hold on to, full or not. If 'as "
            "stored' stays far under the pool: the pool is larger than the traffic needs.",
            {
                "uncompressed": q.total(_NATIVE),
                "as stored": q.total(_OCCUPIED),
                "pool": q.total(q.series("bytes", pool="checkpoint", kind="reserved")),
            },
            unit="bytes",
        ),
    ]


def _p95_and_p50(**labels: str) -> dict[str, str]:
    return {f"p{p} {EACH}": q.quantile(p / 100, "relative_error", by="instance, cache", **labels) for p in (95, 50)}


def _drift() -> list[Panel]:
    return [
        lines(
            "How large is the error of a whole state?",
            "Frobenius error of a compression relative to the state. int8 usually lies between 0.4 % and 1 %; the dashed line is "
            "the budget's ceiling. If it rises with the same model: other traffic, or a state that outgrows its scales; the "
            "heatmap shows which share.",
            {**_p95_and_p50(**ERROR), f"ceiling {EACH}": _ceiling("relative_error", "instance, cache")},
            unit="percentunit",
            runbooks="DriftAboveBaseline",
        ),
        lines(
            "How large is the error of the worst head?",
            "As beside, of the head that fared worst. If it runs away while the whole state doesn't: one head has outliers that "
            "the format can't hold; consider native states for this model.",
            _p95_and_p50(**WORST),
            unit="percentunit",
            runbooks="DriftAboveBaseline",
        ),
        spread(
            "Which errors do how many states have?",
            "Each cell: compressions per second with an error up to that bound, the brighter the more. The bottom row is no "
            "error at all: no codec, or a native state. If a second band appears: two kinds of states, or of traffic.",
            q.buckets("relative_error", **ERROR),
            unit="percentunit",
            runbooks="DriftAboveBaseline",
        ),
        lines(
            "Has the error grown against its own past day?",
            "Mean error of the last hour over that of the last 24 hours. About 1 is unchanged, whatever the model's usual "
            "error is. If it climbs: compare with the last roll-out of the model, the prompts or the engine.",
            {
                EACH: q.ratio(
                    q.mean("relative_error", by="instance, cache", window="1h", **ERROR),
                    f"({q.mean('relative_error', by='instance, cache', window='1d', **ERROR)})",
                )
            },
            unit="suffix:×",
            limits=high_is_bad(1.5, 2),
            runbooks="DriftAboveBaseline",
        ),
        lines(
            "How far apart are the next-token distributions?",
            "KL divergence between a restored and a recomputed run, position by position, over 15 minutes of samples. The guard "
            "judges the mean. If that nears the ceiling, the dashed line: follow the runbook.",
            {
                f"mean {EACH}": _kl("instance, cache"),
                f"p95 {EACH}": q.quantile(0.95, "logit_kl_nats", by="instance, cache", window=q.SAMPLED),
                f"ceiling {EACH}": _ceiling("kl_nats", "instance, cache"),
            },
            unit=NATS,
            runbooks="DriftAboveCeiling",
        ),
        lines(
            "How often is the likeliest token the same?",
            "By cache, over 15 minutes of samples. A single dip is chance: there are few samples. If it stays low together "
            "with a high KL divergence, restored requests answer differently: follow the runbook.",
            {EACH: _agreement("instance, cache")},
            unit="percentunit",
            limits=low_is_bad(0.95, 0.98),
            top=1,
            calcs=("lastNotNull", "min"),
            runbooks="DriftAboveCeiling",
        ),
        lines(
            "Is drift being measured at all?",
            "Sampled checks by outcome. skipped: due, but not made, mostly because the server was never idle. If nothing but "
            "skipped or failed is left, the panels above say nothing about now: raise the sampling rate, or read the log.",
            {"{{outcome}}": f"60 * {q.total(q.rate('drift_checks_total'), 'outcome')}"},
            unit="suffix:/min",
            stacked=True,
            runbooks="DriftUnobserved",
        ),
        lines(
            "Are states refused on their way in?",
            "States given to the codec, by what became of them. If there is any non_finite, the model produced a NaN or Inf: "
            "such a state is never stored, but the request that made it was answered with it. Follow the runbook at the first.",
            {"{{outcome}}": q.total(q.rate("compressions_total"), "outcome")},
            unit="suffix:/s",
            stacked=True,
            runbooks="NonFiniteStates",
        ),
    ]


def _tradeoff() -> list[Panel]:
    by_cache = q.CACHE
    error, saved_share = _error(by_cache), f"1 - {q.ratio(q.total(_OCCUPIED, by_cache), q.total(_NATIVE, by_cache))}"
    return [
        scatter(
            "What does each codec save, and at what drift?",
            "A point for each cache and its codec, now, if its guard is normal: right is more memory saved, up is more error. "
            "Good is right and low. If a point is high but not far right, it pays for nothing: give that cache another codec.",
            Column("memory saved", _named(saved_share), "percentunit"),
            Column("error (p95)", _named(error), "percentunit"),
            by="series",
            runbooks="DriftAboveCeiling",
        ),
        spread(
            "How many lossy round trips has a restored state behind it?",
            "Restores per second by hops. Each hop adds error: sixteen multiply it two to five times. If the band climbs: long "
            "conversations are continued from their own copies again and again; cap the hops.",
            q.buckets("hops"),
            unit="none",
            runbooks="DriftAboveBaseline",
            height=10,
        ),
        rows_of(
            "Which codec runs where, and what does it cost?",
            "A row for each cache. If the codec is none although int8 is configured, or says 3=none though layer 3 was not to "
            "be, the guard went to native, and errors are those of its trials too. Empty cells: nothing was compressed, or "
            "sampled, for 15 minutes; with no codec, the cache is gone.",
            [
                Column("running", q.series("info"), "none"),
                Column("saved", _saved(by_cache), "bytes"),
                Column("fits", _times(by_cache), "suffix:×"),
                Column("error (p95)", error, "percentunit"),
                Column("of its ceiling", _used(error, "relative_error"), "percentunit", high_is_bad(NEARLY, 1)),
                Column("KL (mean)", _kl(by_cache), NATS),
                Column("same token", _agreement(by_cache), "percentunit", low_is_bad(0.95, 0.98)),
                Column("hops (mean)", q.mean("hops", by=by_cache, window=q.SAMPLED), "none", NEUTRAL),
            ],
            {"instance": "instance", "cache": "cache", "codec": "codec", "state_dtype": "states", "version": "version"},
            hidden=["__name__", "fingerprint", "job", "Value #A"],
            runbooks="GuardDegraded",
        ),
    ]


def _guard() -> list[Panel]:
    changes = f"increase({q.series('guard_changes_total')}[{q.PER_STEP}])"
    return [
        timeline(
            "In which mode has the guard been?",
            "By cache: normal stores compressed, native keeps the layers that drifted uncompressed, stopped stores nothing. No "
            "bar: a cache without a guard. If it flaps, the codec hovers at its budget: choose native, or raise the budget on "
            "purpose.",
            {EACH: f"max by (instance, cache) ({_GUARD})"},
            GUARD_STATES,
            runbooks="GuardDegraded",
        ),
        lines(
            "How often does the guard change its mind?",
            "Changes by the mode that they led to. Each one starts the cache over with nothing in it. If there are more than a "
            "few a day: the log names the cause, and the commits between two changes.",
            {"{{to}}": f"round({q.total(changes, 'to')})"},
            unit="none",
            stacked=True,
            runbooks="GuardDegraded",
        ),
        lines(
            "In which format is each layer kept?",
            "Recurrent layers of all chosen caches by the format of their checkpoints now. If none grows, the guard keeps layers "
            "native that drifted: the table above says which, and `eval --per-layer` whether to make that permanent.",
            {"{{codec}}": f"{q.total(q.series('layers'), 'codec')} > 0"},
            unit="none",
            stacked=True,
            width=24,
            runbooks="GuardDegraded",
        ),
    ]


def page() -> Page:
    """The dashboard."""
    return Page(
        uid="mamba-checkpoint-drift",
        title="Memory saved against accuracy drift",
        description="What compressed checkpoints save, what they cost in accuracy, and the two set against each other.",
        rows={
            "Now": _now(),
            "Memory saved": _memory(),
            "The two against each other": _tradeoff(),
            "Accuracy drift": _drift(),
            "The guard": _guard(),
        },
    )
