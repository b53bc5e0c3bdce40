"""Pool: whether there are slots, and who holds them. For those on call."""

from __future__ import annotations

from dashboards import queries as q
from dashboards.look import high_is_bad, low_is_bad
from dashboards.page import Page
from dashboards.panels import Panel, lines, number

A_DAY = 86400
SCARCE, SPARSE, HALF_USED = 0.1, 0.3, 0.6
"""Shares of a pool that can be had: hardly any, not much, and what is worth a forecast."""
SLOW_BURN, FAST_BURN = 0.03, 0.144
"""Shares of the commits that find no slot: what may go on for hours, and what for minutes, before somebody is called."""
EACH = "{{cache}} on {{instance}}"
EACH_POOL = "{{pool}}: {{cache}} on {{instance}}"
RECLAIMABLE = {"state": "free|evictable"}


def _part(by: str, **which: str) -> str:
    return q.ratio(q.total(q.series("slots", **which), by), q.total(q.series("slot_capacity", **_pool(which)), by))


def _pool(which: dict[str, str]) -> dict[str, str]:
    return {"pool": which["pool"]} if "pool" in which else {}


def _share_left() -> str:
    """Of a checkpoint pool; not the count, which also changes when the guard lays the pool out anew."""
    return _part(q.CACHE, pool="checkpoint", **RECLAIMABLE)


def _seconds_left() -> str:
    """Until there is nothing to reclaim, at the pace of the last 15 minutes; a day where that isn't shrinking, or over half."""
    fall = f"(-deriv(({_share_left()})[{q.SAMPLED}:30s]))"
    forecast = q.ratio(f"(({_share_left()}) < {HALF_USED})", fall)
    return f"clamp_max({forecast}, {A_DAY}) or {A_DAY} + 0 * ({_share_left()})"


def _turned_away(window: str, by: str = "") -> str:
    asked = q.rate("slot_allocations_total", window, pool="checkpoint")
    return q.ratio(q.total(q.rate("skips_total", window, reason=q.SHORTAGE), by), q.total(asked, by))


def _now() -> list[Panel]:
    return [
        number(
            "How much of the fullest pool can be had?",
            "Free and evictable checkpoint slots against the capacity, of the cache with the least. A pool that is full but "
            "evictable is healthy. If it is red: requests hold nearly all slots; see who below, then the runbook.",
            f"min({_share_left()})",
            unit="percentunit",
            limits=low_is_bad(SCARCE, SPARSE),
            empty="no pool",
            runbooks="PoolExhaustionImminent",
        ),
        number(
            "How soon is there nothing to reclaim?",
            "At the pace of the last 15 minutes, of the cache that is first. A day also stands for longer, for pools that don't "
            "shrink, and for those that have 60 % left. If it is under an hour: act while there is time, see the runbook.",
            f"min({_seconds_left()})",
            unit="s",
            limits=low_is_bad(1800, 3600),
            empty="no pool",
            runbooks="PoolExhaustionImminent",
        ),
        number(
            "Are commits turned away?",
            "Share of the commits of the last 5 minutes that asked for a slot and got none, of the worst cache. What they hold "
            "can't be reused later; the requests themselves go on. If it isn't 0: see the runbook.",
            f"max({_turned_away(q.RECENT, q.CACHE)})",
            unit="percentunit",
            limits=high_is_bad(SLOW_BURN, FAST_BURN),
            empty="no commits",
            runbooks="PoolExhausted",
        ),
        number(
            "Do evictions hit what is reused?",
            "Share of the forced evictions of the last 5 minutes that threw away a checkpoint that had been reused. Some is "
            "normal. If most are: the working set is larger than the pool; give it more slots, or a denser codec.",
            q.share("evictions_total", "reason=forced", window=q.RECENT, reason="forced", reused="yes"),
            unit="percentunit",
            limits=high_is_bad(0.5, 0.8),
            empty="no evictions",
            runbooks="EvictionStorm",
        ),
        number(
            "Is telemetry losing anything?",
            "Failures inside telemetry in the last hour. The cache isn't affected, but the panels may be: they lack what "
            "failed. If it isn't 0: the log line telemetry_failed names the error.",
            q.total(f"increase({q.series('telemetry_errors_total')}[1h])"),
            unit="none",
            limits=high_is_bad(1, 100),
            empty="no cache",
            runbooks="TelemetryFailing",
        ),
        number(
            "Does every server answer?",
            "Share of the chosen servers whose last scrape worked. If it isn't 100 %: everything else on this page leaves the "
            "missing ones out, so start here.",
            'avg(up{job=~"$job", instance=~"$instance"})',
            unit="percentunit",
            limits=low_is_bad(1, 1),
            empty="nothing scraped",
            runbooks="TargetDown MetricsAbsent",
        ),
    ]


def _states(pool: str, title: str, description: str, runbook: str) -> Panel:
    queries = {
        "{{state}}": q.total(q.series("slots", pool=pool), "state"),
        "capacity": q.total(q.series("slot_capacity", pool=pool)),
    }
    return lines(title, description, queries, unit="none", stacked=True, runbooks=runbook)


def _slots() -> list[Panel]:
    return [
        _states(
            "checkpoint",
            "What are the checkpoint slots doing?",
            "The states add up to the capacity. All blue is good: full, and every slot can be evicted. Orange is in use by a "
            "request now, purple is being written. If both squeeze out green and blue: commits will be turned away.",
            "PoolExhaustionImminent",
        ),
        _states(
            "active",
            "What are the active slots doing?",
            "Slots of running requests. Nothing is evicted here: with none free, requests wait. If that lasts: more active "
            "slots, or fewer requests at a time.",
            "AllLocked",
        ),
        lines(
            "How much of each pool can be had?",
            "Free and evictable against the capacity, by pool and cache. The active pool may well touch 0 under load. If a "
            "checkpoint pool nears 0: commits are about to be turned away.",
            {EACH_POOL: _part("instance, cache, pool", **RECLAIMABLE)},
            unit="percentunit",
            limits=low_is_bad(SCARCE, SPARSE),
            top=1,
            calcs=("lastNotNull", "min"),
            runbooks="PoolExhaustionImminent",
        ),
        lines(
            "When will there be nothing to reclaim?",
            "Time left at the pace of the last 15 minutes. A day also stands for longer, for pools that don't shrink, and for "
            "those that have 60 % left. A short dip is a burst of requests. If a line keeps falling towards an hour: the "
            "runbook says what to do.",
            {EACH: _seconds_left()},
            unit="s",
            limits=low_is_bad(1800, 3600),
            calcs=("lastNotNull", "min"),
            log=True,
            runbooks="PoolExhaustionImminent",
        ),
        lines(
            "How much of the checkpoint pool do requests lock?",
            "Locked slots against the capacity: a request reads them now, so they can't be evicted. If it nears 100 %: more "
            "requests run at a time than the pool has room for.",
            {EACH: _part("instance, cache", pool="checkpoint", state="locked")},
            unit="percentunit",
            limits=high_is_bad(0.7, 1 - SCARCE),
            top=1,
            runbooks="AllLocked",
        ),
        lines(
            "Is any slot never given back?",
            "The least that was in use at any moment of the last 30 minutes. A busy server has a few; after a quiet half hour "
            "it has to be 0. If a line only ever climbs, that is a leak: the runbook says how to find the request.",
            {
                EACH_POOL: q.total(
                    f"{_least(state='locked')} or {_least(pool='active', state='reserved')}", "instance, cache, pool"
                )
            },
            unit="none",
            runbooks="SlotLeak",
        ),
        lines(
            "Do the books balance?",
            "Slots handed out, less those given back, less those in use: 0 but for what moved during the scrape. If it stays "
            "off 0: slots changed hands uncounted, which is a bug; restart the server after following the runbook.",
            {EACH_POOL: f"abs({_imbalance('instance, cache, pool')})"},
            unit="none",
            limits=high_is_bad(None, 10),
            runbooks="SlotLeak",
        ),
        lines(
            "Why are slots given back?",
            "released, donated, evicted, flushed are everyday life. non_finite: a refused state. aborted: a request that ended "
            "before its checkpoint was written. If aborted grows: clients hang up, or a step of the engine fails.",
            {"{{pool}}: {{reason}}": q.total(q.rate("slot_frees_total"), "pool, reason")},
            unit="suffix:/s",
            runbooks="SlotLeak",
        ),
    ]


def _least(**which: str) -> str:
    return f"min_over_time({q.series('slots', **which)}[30m]) and {q.series('slots', **which)}"


def _imbalance(by: str) -> str:
    taken = q.total(q.series("slot_allocations_total", outcome="ok|after_eviction"), by)
    in_use = q.total(q.series("slots", state="reserved|evictable|locked"), by)
    return f"{taken} - {q.total(q.series('slot_frees_total'), by)} - {in_use}"


def _traffic() -> list[Panel]:
    return [
        lines(
            "What becomes of requests for a checkpoint slot?",
            "after_eviction is normal for a full pool. If there are any exhausted or all_locked, they came away with nothing: "
            "commits are being turned away, follow the runbook.",
            {"{{outcome}}": q.total(q.rate("slot_allocations_total", pool="checkpoint"), "outcome")},
            unit="suffix:/s",
            stacked=True,
            runbooks="PoolExhausted",
        ),
        lines(
            "What becomes of requests for an active slot?",
            "exhausted: as many requests were running as there are slots, and one more had to wait. If that lasts: more active "
            "slots, or fewer requests at a time.",
            {"{{outcome}}": q.total(q.rate("slot_allocations_total", pool="active"), "outcome")},
            unit="suffix:/s",
            stacked=True,
        ),
        lines(
            "What becomes of commits?",
            "stored is a new checkpoint, duplicate was there already, skipped stored nothing. If skipped grows: the panel "
            "beside says why.",
            {"{{outcome}}": q.total(q.rate("commits_total"), "outcome")},
            unit="suffix:/s",
            stacked=True,
            runbooks="PoolExhausted",
        ),
        lines(
            "Why do commits store nothing?",
            "too_short, unaligned: by design. degraded: the guard. exhausted, all_locked: no slot. non_finite: a NaN or Inf. If "
            "there is any depth_mismatch: the engine and the cache disagree on where a state is, which is a bug in the engine.",
            {"{{reason}}": q.total(q.rate("skips_total"), "reason")},
            unit="suffix:/s",
            stacked=True,
            runbooks="PoolExhausted",
        ),
        lines(
            "What share of commits finds no slot?",
            "Of the commits that asked for a slot, by cache. In the red for minutes, or in the yellow for hours, somebody is "
            "called. If a line rises: see which slots are locked, and follow the runbook.",
            {EACH: _turned_away(q.PER_STEP, "instance, cache")},
            unit="percentunit",
            limits=high_is_bad(SLOW_BURN, FAST_BURN),
            runbooks="PoolExhausted",
        ),
        lines(
            "Why are checkpoints evicted?",
            "forced: an allocation found no free slot, normal for a full pool. kv_pressure: the engine ran out of KV. "
            "path_cap, hop_cap: thinned out by policy. flush, guard: all at once. If forced nears the rate of commits: see the "
            "next panel.",
            {"{{reason}}": q.total(q.rate("evictions_total"), "reason")},
            unit="suffix:/s",
            stacked=True,
            runbooks="EvictionStorm",
        ),
        lines(
            "Had what was forced out been reused?",
            "Orange is a prefix that was useful and may be missed. If orange dominates: the working set doesn't fit; more "
            "slots, or a denser codec.",
            {
                "had been reused": q.total(q.rate("evictions_total", reason="forced", reused="yes")),
                "never reused": q.total(q.rate("evictions_total", reason="forced", reused="no")),
            },
            unit="suffix:/s",
            stacked=True,
            runbooks="EvictionStorm",
        ),
        lines(
            "How long does a checkpoint live?",
            "Age at eviction. Seconds are thrashing: it is gone before the next turn of a conversation can use it. Minutes are "
            "a conversation, hours a system prompt. If the median falls to seconds: the pool is too small.",
            {
                f"p{round(100 * p)}": q.quantile(p, "residency_seconds", window=q.SAMPLED, ended="evicted")
                for p in (0.1, 0.5, 0.9)
            },
            unit="s",
            limits=low_is_bad(5, 15),
            log=True,
            calcs=("lastNotNull", "min"),
            runbooks="EvictionStorm",
        ),
    ]


def page() -> Page:
    """The dashboard."""
    slots, traffic = _slots(), _traffic()
    return Page(
        uid="mamba-checkpoint-pool",
        title="Pool",
        description="Slots by state, what is left to reclaim, what is turned away and what is thrown away.",
        rows={"Now": _now(), "Slots": slots[:4], "Held, locked, leaked": slots[4:], "Taken, refused, given back": traffic},
    )
