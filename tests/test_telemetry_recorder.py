"""Telemetry as the cache calls it: what each call counts, and that none can do harm."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs
from telemetry_fakes import Clock, Pools, scrape, value

from mamba_checkpoint_cache.telemetry import NULL, Telemetry

Changes = dict[str, float]

CALLS: dict[str, tuple[Callable[[Telemetry], object], Changes]] = {
    "hit": (
        lambda t: t.lookup(prompt=100, reused=64, lost=8, miss=None),
        {"lookups_total hit": 1, "tokens_total prompt": 100, "tokens_total reused": 64, "tokens_total lost": 8},
    ),
    "shallow hit": (
        lambda t: t.lookup(prompt=100, reused=64, lost=0, miss="evicted"),
        {"lookups_total hit": 1, "tokens_total prompt": 100, "tokens_total reused": 64, "misses_total evicted": 1},
    ),
    "miss": (
        lambda t: t.lookup(prompt=7, reused=0, lost=0, miss="empty"),
        {"lookups_total miss": 1, "tokens_total prompt": 7, "misses_total empty": 1},
    ),
    "allocation": (lambda t: t.allocation("active", "exhausted"), {"slot_allocations_total active exhausted": 1}),
    "freed": (lambda t: t.freed("checkpoint", "flushed"), {"slot_frees_total checkpoint flushed": 1}),
    "compression": (
        lambda t: t.compression("stored", bytes_in=400, bytes_out=110),
        {"compressions_total stored": 1, "codec_bytes_total in": 400, "codec_bytes_total out": 110},
    ),
    "report": (
        lambda t: t.report(0.0045, 0.25),
        {
            "relative_error_sum state": 0.0045,
            "relative_error_count state": 1,
            "relative_error_sum worst_head": 0.25,
            "relative_error_count worst_head": 1,
        },
    ),
    "restored": (
        lambda t: t.restored("restored", 3, bytes_in=110, bytes_out=400),
        {"restores_total restored": 1, "codec_bytes_total in": 110, "codec_bytes_total out": 400, "hops_sum": 3, "hops_count": 1},
    ),
    "zeroed": (lambda t: t.restored("zeroed", 0, bytes_out=400), {"restores_total zeroed": 1, "codec_bytes_total out": 400}),
    "committed": (lambda t: t.committed("duplicate"), {"commits_total duplicate": 1}),
    "skipped": (lambda t: t.committed("skipped", "unaligned"), {"commits_total skipped": 1, "skips_total unaligned": 1}),
    "check": (
        lambda t: t.checked("ok", kl_nats=(0.25, 0.0, 0.5), agreed=(True, False, True)),
        {
            "drift_checks_total ok": 1,
            "logit_kl_nats_sum": 0.75,
            "logit_kl_nats_count": 3,
            "top1_agreement_total yes": 2,
            "top1_agreement_total no": 1,
        },
    ),
    "no check": (lambda t: t.checked("skipped"), {"drift_checks_total skipped": 1}),
    "guard": (lambda t: t.guard_changed("native", cause="checks", commits=7, codec="none"), {"guard_changes_total native": 1}),
    "evicted": (
        lambda t: t.evicted("path_cap", True, None),
        {"evictions_total checkpoint path_cap yes": 1},
    ),
}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def telemetry(clock: Clock) -> Telemetry:
    return Telemetry(clock=clock)


def errors(telemetry: Telemetry) -> float | None:
    return value(telemetry.registry, "telemetry_errors_total")


def totals(telemetry: Telemetry) -> Changes:
    """Counters, sums and counts that are not 0, as 'name label label'."""
    order = ("pool", "reason", "reused", "outcome", "kind", "direction", "scope", "ended", "operation", "agreed", "to")
    found = {}
    for (name, labels), amount in scrape(telemetry.registry).items():
        if amount and not name.endswith("_bucket"):
            by_name = dict(labels)
            words = [name.removeprefix("mamba_checkpoint_"), *(by_name[label] for label in order if label in by_name)]
            found[" ".join(words)] = amount
    return found


@pytest.mark.parametrize("call", CALLS)
def test_each_call_counts_exactly_this(telemetry: Telemetry, call: str) -> None:
    """Every call moves the series that it is about, by the right amount, and no other."""
    act, expected = CALLS[call]

    act(telemetry)

    assert totals(telemetry) == pytest.approx(expected)


@pytest.mark.parametrize("pool", ["active", "checkpoint"])
@pytest.mark.parametrize("outcome", ["ok", "after_eviction", "exhausted", "all_locked"])
def test_allocations_by_pool(telemetry: Telemetry, pool: str, outcome: str) -> None:
    """One series per pool and outcome: the pools are never mixed (fault 26)."""
    telemetry.allocation(pool, outcome)  # type: ignore[arg-type]

    assert totals(telemetry) == {f"slot_allocations_total {pool} {outcome}": 1}


def test_residency_and_reuse_of_what_is_evicted(telemetry: Telemetry, clock: Clock) -> None:
    """An eviction counts once by reason and reuse, and observes how long the checkpoint lived; a flush ends it as flushed."""
    birth = telemetry.born()
    clock.tick(42)
    telemetry.evicted("forced", False, birth)
    clock.tick(8)
    telemetry.evicted("flush", True, birth)

    assert totals(telemetry) == {
        "evictions_total checkpoint forced no": 1,
        "evictions_total checkpoint flush yes": 1,
        "residency_seconds_sum evicted": 42,
        "residency_seconds_count evicted": 1,
        "residency_seconds_sum flushed": 50,
        "residency_seconds_count flushed": 1,
    }


def test_an_eviction_links_to_the_commit_that_stored_it(clock: Clock) -> None:
    """The evict span links to the commit span of each checkpoint it drops, also when born was called deeper inside a commit."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = Telemetry(tracer_provider=provider, clock=clock)
    births = []
    for _ in range(2):
        with telemetry.operation("commit"), telemetry.operation("compress"):
            births.append(telemetry.born())
    stray = telemetry.born()  # outside of any commit: nothing to link to
    with telemetry.operation("commit"), telemetry.operation("alloc"), telemetry.operation("evict"):
        for birth in (*births, stray):
            telemetry.evicted("forced", True, birth)

    spans = exporter.get_finished_spans()
    commits = [span.context for span in spans if span.name.endswith(".commit")]
    (evict,) = [span for span in spans if span.name.endswith(".evict")]
    assert [link.context for link in evict.links] == commits[:2]
    assert [span.name for span in spans if span.links] == ["mamba_checkpoint.evict"]
    assert errors(telemetry) == 0


def test_an_eviction_outside_of_our_spans_links_nothing(clock: Clock) -> None:
    """A request span of the engine that happens to be current gets no links of ours."""
    provider = TracerProvider()
    telemetry = Telemetry(tracer_provider=provider, clock=clock)
    with telemetry.operation("commit"):
        birth = telemetry.born()

    with provider.get_tracer("engine").start_as_current_span("request") as request:
        telemetry.evicted("kv_pressure", True, birth)

    assert request.links == ()  # type: ignore[attr-defined]


def test_a_thousand_exhausted_commits_make_one_line(telemetry: Telemetry, clock: Clock) -> None:
    """Exhaustion is counted a thousand times and logged once (fault 1)."""
    with capture_logs() as lines:
        for _ in range(1000):
            telemetry.committed("skipped", "all_locked")
            clock.tick(0.01)

    assert value(telemetry.registry, "skips_total", reason="all_locked") == 1000
    assert lines == [
        {"event": "mamba_checkpoint.slots_exhausted", "log_level": "warning", "cache": "default", "reason": "all_locked"}
    ]


@pytest.mark.parametrize("reason", ["non_finite", "depth_mismatch", "too_short", "unaligned"])
def test_other_skips_are_no_exhaustion(telemetry: Telemetry, reason: str) -> None:
    """Only the want of a slot is logged as such."""
    with capture_logs() as lines:
        telemetry.committed("skipped", reason)  # type: ignore[arg-type]

    assert lines == []


def test_a_refused_state_is_an_error_in_the_log(telemetry: Telemetry) -> None:
    """NaN in a state means that the model or the engine is broken: said at error, once a minute."""
    with capture_logs() as lines:
        telemetry.compression("non_finite", bytes_in=4, bytes_out=2)
        telemetry.compression("non_finite", bytes_in=4, bytes_out=2)

    assert [(line["event"], line["log_level"]) for line in lines] == [("mamba_checkpoint.state_non_finite", "error")]


@pytest.mark.parametrize("call", CALLS)
def test_a_metric_that_raises_is_contained_and_counted(telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """If every counter and histogram raises, no call does: the failures are counted, one line is logged, it works again after."""

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("broken")

    act, expected = CALLS[call]
    metrics = telemetry._metrics
    broken = [*(c for c in metrics._counters.values() if c is not metrics.errors), *metrics.histograms.values()]
    with monkeypatch.context() as patch, capture_logs() as lines:
        for instrument in broken:
            patch.setattr(instrument, "inc" if hasattr(instrument, "inc") else "settle", fail)
        act(telemetry)
        assert (errors(telemetry) or 0) >= 1
        assert totals(telemetry).keys() == {"telemetry_errors_total"}

    failed = [line["error"] for line in lines if line["event"] == "mamba_checkpoint.telemetry_failed"]
    assert failed == ["RuntimeError('broken')"]
    act(telemetry)
    assert totals(telemetry).keys() == {"telemetry_errors_total", *expected}


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("lookup", {"prompt": 1, "reused": "many", "lost": 0, "miss": None}),
        ("lookup", {"prompt": 1, "reused": 1, "lost": 0, "miss": "/a/path"}),
        ("lookup", {"prompt": torch.ones(3), "reused": 1, "lost": 0, "miss": None}),
        ("allocation", {"pool": "gpu", "outcome": "ok"}),
        ("allocation", {"pool": [], "outcome": "ok"}),
        ("freed", {"pool": "active", "reason": None}),
        ("compression", {"outcome": "stored", "bytes_in": -1}),
        ("compression", {"outcome": "lost"}),
        ("report", {"relative_error": math.nan, "worst_head": 0.1}),
        ("report", {"relative_error": None, "worst_head": 0.1}),
        ("restored", {"outcome": "restored", "hops": math.inf}),
        ("committed", {"outcome": "skipped", "reason": "request-4711"}),
        ("committed", {"outcome": "skipped", "reason": {}}),
        ("checked", {"outcome": "fine"}),
        ("checked", {"outcome": "ok", "kl_nats": [-0.5]}),
        ("checked", {"outcome": "ok", "kl_nats": "x"}),
        ("checked", {"outcome": "ok", "agreed": None}),
        ("guard_changed", {"to": "asleep", "cause": "checks", "commits": 1, "codec": "none"}),
        ("evicted", {"reason": "bored", "reused": True, "birth": None}),
        ("evicted", {"reason": "forced", "reused": torch.ones(3), "birth": None}),
    ],
)
def test_nonsense_is_contained_counted_and_makes_no_series(
    telemetry: Telemetry, method: str, arguments: dict[str, object]
) -> None:
    """Wrong values of any kind never raise and never create a series (faults 29, 33)."""
    before = scrape(telemetry.registry).keys()

    getattr(telemetry, method)(**arguments)

    assert errors(telemetry) == 1
    assert scrape(telemetry.registry).keys() == before


def test_one_bad_number_does_not_cost_the_good_ones(telemetry: Telemetry) -> None:
    """A NaN beside a good value is dropped alone, and no sum is poisoned."""
    telemetry.report(math.nan, 0.25)
    telemetry.lookup(prompt=10, reused=-1, lost=2, miss="evicted")

    assert totals(telemetry) == {
        "relative_error_sum worst_head": 0.25,
        "relative_error_count worst_head": 1,
        "lookups_total miss": 1,
        "tokens_total prompt": 10,
        "tokens_total lost": 2,
        "misses_total evicted": 1,
        "telemetry_errors_total": 2,
    }


def test_scalars_of_numpy_and_torch_are_numbers(telemetry: Telemetry) -> None:
    """Host scalars of either library count as the numbers they hold."""
    telemetry.lookup(prompt=np.int64(10), reused=torch.tensor(4), lost=torch.tensor(2.0), miss=None)  # type: ignore[arg-type]
    telemetry.report(np.float32(0.5), torch.tensor(0.25))  # type: ignore[arg-type]

    assert totals(telemetry) == {
        "lookups_total hit": 1,
        "tokens_total prompt": 10,
        "tokens_total reused": 4,
        "tokens_total lost": 2,
        "relative_error_sum state": 0.5,
        "relative_error_count state": 1,
        "relative_error_sum worst_head": 0.25,
        "relative_error_count worst_head": 1,
    }


def test_even_a_broken_error_counter_and_log_harm_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """When what counts and what logs the failures fail themselves, the call still returns."""

    class Broken:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError("broken")

    telemetry = Telemetry(logger=Broken())
    monkeypatch.setattr(telemetry._metrics, "errors", Broken())

    telemetry.freed("active", "nonsense")  # type: ignore[arg-type]
    telemetry.committed("skipped", "exhausted")
    with telemetry.operation("match") as operation:
        operation.set(depth=1)

    assert value(telemetry.registry, "skips_total", reason="exhausted") == 1
    assert value(telemetry.registry, "operation_seconds_count", operation="match") == 1


def test_a_kl_that_is_not_finite_is_no_failure_of_telemetry(telemetry: Telemetry) -> None:
    """The check counts, the sum stays a number, and the positions that have a KL are observed."""
    telemetry.checked("over_budget", kl_nats=(math.nan, 0.5, math.inf), agreed=(False, True, False))

    assert totals(telemetry) == {
        "drift_checks_total over_budget": 1,
        "logit_kl_nats_sum": 0.5,
        "logit_kl_nats_count": 1,
        "top1_agreement_total yes": 1,
        "top1_agreement_total no": 2,
    }


def test_a_check_that_failed_says_why_once_a_minute(telemetry: Telemetry) -> None:
    """One warning with the error, however many follow; counting it is left to the check's outcome."""
    with capture_logs() as lines:
        for _ in range(3):
            telemetry.check_failed(ValueError("no such depth"))

    assert lines == [
        {
            "event": "mamba_checkpoint.drift_check_failed",
            "log_level": "warning",
            "cache": "default",
            "error": "ValueError('no such depth')",
        }
    ]
    assert totals(telemetry) == {}


def test_a_change_of_the_guard_is_logged_both_ways(telemetry: Telemetry) -> None:
    """Whoever is told that it degraded is told that it recovered, at the same level, with the mode and why."""
    with capture_logs() as lines:
        telemetry.guard_changed("stopped", cause="compressions", commits=99, codec="int8")
        telemetry.guard_changed("normal", cause="trials", commits=256, codec="int8")

    assert lines == [
        {
            "event": "mamba_checkpoint.guard_degraded",
            "log_level": "warning",
            "cache": "default",
            "mode": "stopped",
            "cause": "compressions",
            "commits": 99,
            "codec": "int8",
        },
        {
            "event": "mamba_checkpoint.guard_recovered",
            "log_level": "warning",
            "cache": "default",
            "mode": "normal",
            "cause": "trials",
            "commits": 256,
            "codec": "int8",
        },
    ]


def test_a_change_of_the_guard_is_an_event_on_the_current_span() -> None:
    """On ours where one is open, else on the engine's; with the name and plain attributes that are promised."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = Telemetry(tracer_provider=provider)
    with telemetry.operation("commit"), telemetry.operation("compress"):
        telemetry.guard_changed("native", cause="compressions", commits=5, codec="int8,1=none")
    with provider.get_tracer("engine").start_as_current_span("step"):
        telemetry.guard_changed("normal", cause="trials", commits=6, codec="int8")

    events = {
        span.name: [(event.name, dict(event.attributes or {})) for event in span.events] for span in exporter.get_finished_spans()
    }
    assert events == {
        "mamba_checkpoint.commit": [],
        "mamba_checkpoint.compress": [
            (
                "mamba_checkpoint.guard",
                {
                    "mamba_checkpoint.cache": "default",
                    "mamba_checkpoint.mode": "native",
                    "mamba_checkpoint.cause": "compressions",
                    "mamba_checkpoint.commits": 5,
                    "mamba_checkpoint.codec": "int8,1=none",
                },
            )
        ],
        "step": [
            (
                "mamba_checkpoint.guard",
                {
                    "mamba_checkpoint.cache": "default",
                    "mamba_checkpoint.mode": "normal",
                    "mamba_checkpoint.cause": "trials",
                    "mamba_checkpoint.commits": 6,
                    "mamba_checkpoint.codec": "int8",
                },
            )
        ],
    }


def test_failures_are_logged_once_a_minute(telemetry: Telemetry, clock: Clock) -> None:
    """A telemetry that fails on every call doesn't flood the log (fault 1), and each failure is counted."""
    with capture_logs() as lines:
        for _ in range(1000):
            telemetry.freed("active", "nonsense")  # type: ignore[arg-type]
        assert errors(telemetry) == 1000
        clock.tick(61)
        telemetry.freed("active", "nonsense")  # type: ignore[arg-type]
        assert errors(telemetry) == 1001

    assert [line.get("suppressed") for line in lines] == [None, 999]


def test_the_pools_are_read_at_each_scrape_until_closed(telemetry: Telemetry) -> None:
    """observe_pools is called once; the gauges follow the pools; after close nothing is exposed and the pools are let go."""
    pools = Pools()
    telemetry.observe_pools(pools)
    pools.active = (1, 2, 0, 5)
    assert [value(telemetry.registry, "slots", pool="active", state=s) for s in ("free", "reserved", "evictable", "locked")] == [
        1,
        2,
        0,
        5,
    ]

    telemetry.close()
    telemetry.close()

    assert scrape(telemetry.registry) == {}
    assert telemetry._metrics.source is None
    telemetry.freed("active", "released")  # late calls are harmless
    with telemetry.operation("free"):
        pass


def test_a_snapshot_that_fails_is_counted_in_the_same_scrape(telemetry: Telemetry) -> None:
    """The scrape that misses its gauges says so itself."""
    telemetry.observe_pools(lambda: 1 / 0)  # type: ignore[arg-type,return-value]

    assert errors(telemetry) == 1


def test_caches_share_a_registry_by_name() -> None:
    """Two caches of different names live in one registry, the same name twice is refused, an empty one too."""
    registry = CollectorRegistry()
    first, second = Telemetry("a", registry=registry), Telemetry("b", registry=registry)
    second.freed("active", "released")

    assert value(registry, "slot_frees_total", cache="a", pool="active", reason="released") == 0
    assert value(registry, "slot_frees_total", cache="b", pool="active", reason="released") == 1
    with pytest.raises(ValueError, match="give this one another name"):
        Telemetry("a", registry=registry)
    with pytest.raises(ValueError, match="name"):
        Telemetry("")
    first.close()
    Telemetry("a", registry=registry).close()
    second.close()
    assert scrape(registry) == {}


def test_null_has_every_method_and_does_nothing() -> None:
    """What stands in for no telemetry answers each call of the real one, and overrides all of them."""
    names = [name for name, member in inspect.getmembers(Telemetry, inspect.isfunction) if not name.startswith("_")]
    assert set(names) == {
        *("observe_pools", "operation", "lookup", "allocation", "freed", "compression", "report", "restored", "committed"),
        *("born", "evicted", "checked", "check_failed", "guard_changed", "moved", "within", "close"),
    }
    for name in names:
        assert getattr(type(NULL), name) is not getattr(Telemetry, name)

    for act, _ in CALLS.values():
        act(NULL)
    NULL.observe_pools(Pools())
    NULL.evicted("forced", True, NULL.born())
    NULL.close()


def test_null_lets_exceptions_through() -> None:
    """An operation of no telemetry swallows nothing either."""

    def fail() -> None:
        with NULL.operation("match") as outer, NULL.operation("alloc") as inner:
            outer.set(depth=1)
            inner.set(pool="active")
            raise KeyError("the body's")

    with pytest.raises(KeyError, match="the body's"):
        fail()
