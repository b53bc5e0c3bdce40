"""Reuse: what the cache brings, and what it costs in time. For those who tune it."""

from __future__ import annotations

from dashboards import queries as q
from dashboards.look import NEUTRAL, high_is_bad, low_is_bad
from dashboards.page import Page
from dashboards.panels import Panel, lines, number, spread

EACH = "{{cache}} on {{instance}}"
CODEC = "compress|restore"
BOUNDARY = "match|restore|commit"
"""The calls of the public API; the other operations happen inside of these."""


def _reused(window: str, by: str = "") -> str:
    return q.share("tokens_total", "kind=prompt", by=by, window=window, kind="reused")


def _lost(window: str, by: str = "") -> str:
    return q.share("tokens_total", "kind=prompt", by=by, window=window, kind="lost")


def _hits(window: str, by: str = "") -> str:
    return q.share("lookups_total", by=by, window=window, outcome="hit")


def _now() -> list[Panel]:
    return [
        number(
            "What share of prompt tokens is reused?",
            "Over the last 5 minutes. Good depends on the traffic: compare with the same hour of another day. If it fell: the "
            "row on lookups says why prompts miss.",
            _reused(q.RECENT),
            unit="percentunit",
            limits=low_is_bad(0.001, 0.01),
            empty="no lookups",
            runbooks="CacheInert",
        ),
        number(
            "What share of lookups hits?",
            "Over the last 5 minutes; a hit reuses at least a token. If it is 0 though there are lookups, the cache does "
            "nothing: follow the runbook.",
            _hits(q.RECENT),
            unit="percentunit",
            limits=low_is_bad(0.001, 0.01),
            empty="no lookups",
            runbooks="CacheInert",
        ),
        number(
            "What share of tokens is lost?",
            "Tokens whose KV was in the tree, but with no checkpoint to continue from, over the last 5 minutes: what a larger "
            "pool or a better placement could save. If it is high: more slots, or a denser codec.",
            _lost(q.RECENT),
            unit="percentunit",
            limits=high_is_bad(0.25, 0.5),
            empty="no lookups",
            runbooks="EvictionStorm",
        ),
        number(
            "How long does a restore take?",
            "95 % of the restores of the last 5 minutes were faster, as seen by the calling thread. If it rises: see the "
            "heatmap below, and whether something else keeps the device busy.",
            q.quantile(0.95, "operation_seconds", window=q.RECENT, operation="restore"),
            unit="s",
            limits=NEUTRAL,
            empty="no restores",
        ),
        number(
            "How much time does the cache take?",
            "Share of the calling thread's time spent in match, restore and commit, over the last 5 minutes, of the server "
            "with the most. If it is high: reuse has to be worth it; compare with the tokens reused.",
            f"max({q.total(q.busy(q.RECENT, operation=BOUNDARY), q.CACHE)})",
            unit="percentunit",
            limits=high_is_bad(0.2, 0.5),
            empty="no cache",
        ),
        number(
            "How fast is the codec?",
            "Bytes read by compressing and restoring, per second of doing so, over the last 5 minutes. On a GPU the calling "
            "thread only starts the work: an upper bound there. If it seems low: compare with `bench codec` on the same machine.",
            q.ratio(q.total(q.rate("codec_bytes_total", q.RECENT, direction="in")), q.total(q.busy(q.RECENT, operation=CODEC))),
            unit="binBps",
            limits=NEUTRAL,
            empty="no work",
        ),
    ]


def _tokens() -> list[Panel]:
    prompt, reused, lost = (q.total(q.rate("tokens_total", kind=kind)) for kind in ("prompt", "reused", "lost"))
    return [
        lines(
            "Where do prompt tokens come from?",
            "All prompt tokens: reused, or recomputed. Lost ones are recomputed although their KV was there: no checkpoint to "
            "continue from. If orange grows at the cost of green: checkpoints are evicted too early.",
            {"reused": reused, "lost": lost, "new": f"{prompt} - {reused} - {lost}"},
            unit="suffix:/s",
            stacked=True,
            runbooks="CacheInert",
        ),
        lines(
            "What share of prompt tokens does each cache reuse?",
            "By cache. If one is far below its siblings: it gets other traffic, or requests of a conversation don't come back "
            "to the same server.",
            {EACH: _reused(q.PER_STEP, "instance, cache")},
            unit="percentunit",
            limits=NEUTRAL,
            top=1,
            calcs=("lastNotNull", "min"),
            runbooks="CacheInert",
        ),
    ]


def _lookups() -> list[Panel]:
    return [
        lines(
            "Do lookups hit?",
            "A hit reuses at least a token. If misses take over: the panel beside says why.",
            {"{{outcome}}": q.total(q.rate("lookups_total"), "outcome")},
            unit="suffix:/s",
            stacked=True,
            runbooks="CacheInert",
        ),
        lines(
            "Why was no more reused?",
            "Counted for hits too, if more was possible. never_checkpointed: none was placed there. no_shared_prefix, empty: "
            "new traffic. hop_cap: too many lossy round trips. If evicted dominates, the pool is too small: more slots, or a "
            "denser codec.",
            {"{{reason}}": q.total(q.rate("misses_total"), "reason")},
            unit="suffix:/s",
            stacked=True,
            runbooks="CacheInert",
        ),
        lines(
            "What share of lookups hits in each cache?",
            "By cache. If a line lies at 0 while there are lookups, that cache does nothing: follow the runbook.",
            {EACH: _hits(q.PER_STEP, "instance, cache")},
            unit="percentunit",
            limits=NEUTRAL,
            top=1,
            calcs=("lastNotNull", "min"),
            runbooks="CacheInert",
        ),
        lines(
            "What do requests start from?",
            "restored: from a checkpoint. zeroed: from nothing. If zeroed takes over while lookups hit: the engine doesn't use "
            "what it was given.",
            {"{{outcome}}": q.total(q.rate("restores_total"), "outcome")},
            unit="suffix:/s",
            stacked=True,
            runbooks="CacheInert",
        ),
    ]


def _latency(operation: str, title: str, hint: str) -> Panel:
    return spread(title, hint, q.buckets("operation_seconds", operation=operation), unit="s", width=8)


def _time() -> list[Panel]:
    by_operation = {"{{operation}}": q.quantile(0.95, "operation_seconds", by="operation")}
    return [
        _latency(
            "match",
            "How long does a match take?",
            "Matches per second by duration, the brighter the more. 5 to 50 µs is usual. If it climbs: the tree has grown, or "
            "a match waits for a checkpoint's report to arrive.",
        ),
        _latency(
            "restore",
            "How long do restores take?",
            "Restores per second by duration. Two bands are usual: zeroing is faster than decompressing. If they climb: "
            "another user of the device, or a slower codec than before.",
        ),
        _latency(
            "commit",
            "How long does a commit take?",
            "Commits per second by duration; duplicates and skips make a fast band. If they climb: the compression inside, or "
            "the evictions that it needs; see the next panels.",
        ),
        lines(
            "Which operation got slower?",
            "95 % of the calls were faster, by operation; the log axis shows all. If a line steps up and stays there: open the "
            "trace of such a call from one of the points, where traces are sampled.",
            by_operation,
            unit="s",
            log=True,
        ),
        lines(
            "How slow are the calls that an engine waits for?",
            "99 % of the calls of match, restore and commit were faster. If one jumps alone: open a trace from a point and see "
            "which step inside took the time.",
            {"{{operation}}": q.quantile(0.99, "operation_seconds", by="operation", operation=BOUNDARY)},
            unit="s",
            log=True,
        ),
        lines(
            "How often is each operation called?",
            "Calls per second. match and restore go with requests, commit and compress with checkpoints, evict with a full "
            "pool. If evict nears commit for long: see the Pool dashboard.",
            {"{{operation}}": q.total(q.calls(), "operation")},
            unit="suffix:/s",
            runbooks="EvictionStorm",
        ),
        lines(
            "What takes the calling thread's time?",
            "Share of a second spent in each call of the API, of all chosen servers together. If commit dominates: fewer "
            "checkpoints, or a faster codec; if match: see its heatmap.",
            {"{{operation}}": q.total(q.busy(operation=BOUNDARY), "operation")},
            unit="percentunit",
            stacked=True,
        ),
        lines(
            "How much does the codec move?",
            "Bytes per second read and written by compressing and restoring. Written far below read is mostly compressing, far "
            "above mostly restoring. If both fall while requests don't: less is stored and reused.",
            {
                "read": q.total(q.rate("codec_bytes_total", direction="in")),
                "written": q.total(q.rate("codec_bytes_total", direction="out")),
            },
            unit="binBps",
        ),
        lines(
            "How fast is the codec while it works?",
            "Bytes read per second of compressing or restoring. On a GPU the calling thread only starts the work: an upper "
            "bound there. If it falls on a CPU: other work takes its cores.",
            {
                EACH: q.ratio(
                    q.total(q.rate("codec_bytes_total", direction="in"), "instance, cache"),
                    q.total(q.busy(operation=CODEC), "instance, cache"),
                )
            },
            unit="binBps",
        ),
    ]


def page() -> Page:
    """The dashboard."""
    time = _time()
    return Page(
        uid="mamba-checkpoint-reuse",
        title="Reuse",
        description="Prompt tokens reused, lost and recomputed, why lookups miss, and the time that it all takes.",
        rows={"Now": _now(), "Tokens": _tokens(), "Lookups": _lookups(), "Time": time[:7], "Codec": time[7:]},
    )
