"""The metrics of one cache in a registry that others use too."""

from __future__ import annotations

import gc
import math
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from telemetry_fakes import Pools, scrape, value

from mamba_checkpoint_cache.telemetry.catalogue import METRICS, VERSION
from mamba_checkpoint_cache.telemetry.containment import Containment
from mamba_checkpoint_cache.telemetry.instruments import taken
from mamba_checkpoint_cache.telemetry.metrics import MOST_UNSETTLED, SETTLE_EVERY, Metrics, PoolSnapshot, PoolsSnapshot

SERIES_BUDGET = 350


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def errors() -> list[Exception]:
    return []


@pytest.fixture
def metrics(registry: CollectorRegistry, errors: list[Exception]) -> Iterator[Metrics]:
    metrics = Metrics("default", registry, Containment(errors.append))
    yield metrics
    metrics.close()


def test_every_label_value_exists_at_zero_on_the_first_scrape(metrics: Metrics, registry: CollectorRegistry) -> None:
    """A counter that first appears at 1 has no increase: so each one is there from the start, at 0 (fault 32)."""
    samples = scrape(registry)

    for metric in METRICS:
        for values in product(*(label.values for label in metric.labels)):
            labels = frozenset({"cache": "default", **dict(zip(metric.label_names[1:], values, strict=True))}.items())
            if metric.type == "counter":
                assert samples[metric.full_name, labels] == 0
            elif metric.type == "histogram":
                assert samples[f"{metric.full_name}_count", labels] == 0
                assert samples[f"{metric.full_name}_sum", labels] == 0


def test_gauges_follow_the_live_pools_without_further_calls(metrics: Metrics, registry: CollectorRegistry) -> None:
    """Each scrape reads the pools as they are then; an idle cache can't show a stale value (fault 24)."""
    pools = Pools()
    metrics.source = pools
    assert value(registry, "slots", pool="checkpoint", state="free") == 16

    pools.checkpoint = (5, 1, 8, 2)

    assert [value(registry, "slots", pool="checkpoint", state=s) for s in ("free", "reserved", "evictable", "locked")] == [
        5,
        1,
        8,
        2,
    ]
    assert value(registry, "slots", pool="active", state="free") == 8
    assert value(registry, "slot_capacity", pool="checkpoint") == 16
    assert value(registry, "bytes", pool="checkpoint", kind="reserved") == 510
    assert value(registry, "bytes", pool="checkpoint", kind="occupied") == 240
    assert value(registry, "bytes", pool="checkpoint", kind="native_equivalent") == 800
    info = {"codec": "int8", "state_dtype": "float32", "version": VERSION, "fingerprint": "0123456789abcdef-int8"}
    assert value(registry, "info", **info) == 1


def test_the_mode_of_a_guard_is_one_of_its_modes(metrics: Metrics, registry: CollectorRegistry) -> None:
    """1 for the mode that is, 0 for the others; no claim at all where no guard watches."""
    pools = Pools()
    metrics.source = pools
    assert value(registry, "guard_mode", mode="normal") is None

    for mode in ("normal", "native", "stopped"):
        metrics.source = lambda mode=mode: replace(pools(), guard=mode)
        found = {m: value(registry, "guard_mode", mode=m) for m in ("normal", "native", "stopped")}
        assert found == {"normal": 0, "native": 0, "stopped": 0} | {mode: 1}


def test_the_ceilings_of_a_guard_are_those_it_was_given(metrics: Metrics, registry: CollectorRegistry) -> None:
    """By kind, a ceiling without end as a number that nothing exceeds; no claim at all where no guard watches."""
    pools = Pools()
    metrics.source = pools
    assert value(registry, "drift_budget", kind="relative_error") is None

    metrics.source = lambda: replace(pools(), ceilings={"relative_error": 0.02, "kl_nats": math.inf})

    assert value(registry, "drift_budget", kind="relative_error") == 0.02
    assert value(registry, "drift_budget", kind="kl_nats") == sys.float_info.max


def test_no_gauges_before_there_are_pools(metrics: Metrics, registry: CollectorRegistry) -> None:
    """Until a cache reports its pools, no gauge claims anything about them."""
    assert value(registry, "slot_capacity", pool="active") is None


def test_a_failing_snapshot_costs_its_gauges_and_nothing_else(
    metrics: Metrics, registry: CollectorRegistry, errors: list[Exception]
) -> None:
    """If the pools can't be read, the counters are still scraped, no gauge shows an old value, and the failure is reported."""
    metrics.source = Pools()
    assert value(registry, "slot_capacity", pool="active") == 8
    metrics.source = lambda: 1 / 0  # type: ignore[assignment,return-value]

    assert value(registry, "slot_capacity", pool="active") is None
    assert value(registry, "lookups_total", outcome="hit") == 0
    assert {type(error) for error in errors} == {ZeroDivisionError}


@pytest.mark.parametrize(
    "pool",
    [
        PoolSnapshot("host", 1, (1, 0, 0, 0), 1, 1, 1),  # type: ignore[arg-type]
        PoolSnapshot("active", 1, (1, 0, 0), 1, 1, 1),
        PoolSnapshot("active", 1, (1, 0, 0, 0), math.nan, 1, 1),  # type: ignore[arg-type]
        PoolSnapshot("active", 1, (2, 0, -1, 0), 1, 1, 1),
    ],
    ids=["unknown pool", "three states", "nan", "negative"],
)
def test_a_nonsensical_snapshot_makes_no_series(
    metrics: Metrics, registry: CollectorRegistry, errors: list[Exception], pool: PoolSnapshot
) -> None:
    """Unknown pools, missing states and impossible numbers are refused, not exposed."""
    before = scrape(registry)
    metrics.source = lambda: PoolsSnapshot((pool,), Pools()().info)

    assert scrape(registry) == before
    assert len(errors) == 1


@pytest.mark.parametrize(
    "amount", [2, np.int64(2), np.float32(2), torch.tensor(2), torch.tensor(2.0, dtype=torch.bfloat16), True + 1]
)
def test_amounts_become_plain_floats(metrics: Metrics, registry: CollectorRegistry, amount: float) -> None:
    """A numpy or torch scalar adds its number, and leaves no array behind in the sum."""
    metrics.add(("tokens_total", "prompt", amount))
    metrics.histograms["hops",].observe(amount)

    for name, labels in (("tokens_total", {"kind": "prompt"}), ("hops_sum", {})):
        found = value(registry, name, **labels)
        assert found == 2
        assert type(found) is float


@pytest.mark.parametrize(
    "bad", [math.nan, math.inf, -math.inf, -1, torch.tensor(math.nan), np.float64("inf"), torch.ones(3), None, "x"]
)
def test_impossible_amounts_are_refused_whole(
    metrics: Metrics, registry: CollectorRegistry, errors: list[Exception], bad: float
) -> None:
    """NaN, Inf, a negative or no number at all changes nothing and is reported; the next good value counts (fault 29)."""
    before = scrape(registry)
    metrics.add(("tokens_total", "prompt", bad))
    metrics.histograms["hops",].observe(bad)
    assert scrape(registry) == before
    assert len(errors) == 2

    metrics.add(("tokens_total", "prompt", 3))
    metrics.histograms["hops",].observe(3)
    assert value(registry, "tokens_total", kind="prompt") == 3
    assert value(registry, "hops_sum") == 3


@pytest.mark.parametrize(
    "series", [("misses_total", "/etc/passwd"), ("misses_total",), ("nonsense_total",), ("misses_total", ["x"])]
)
def test_unknown_names_make_no_series(
    metrics: Metrics, registry: CollectorRegistry, errors: list[Exception], series: tuple[str, ...]
) -> None:
    """A label value outside the catalogue is an error and creates nothing: series can't grow without bound (fault 33)."""
    before = scrape(registry)
    metrics.add((*series, 1))
    metrics.add(("lookups_total", "hit", 1))

    assert scrape(registry).keys() == before.keys()
    assert len(errors) == 1
    assert value(registry, "lookups_total", outcome="hit") == 1


@pytest.mark.parametrize(("number", "bucket"), [(0, "0.0"), (6, "6.0"), (6.001, "8.0"), (64, "64.0"), (65, "+Inf")])
def test_a_bound_belongs_to_its_bucket(metrics: Metrics, registry: CollectorRegistry, number: float, bucket: str) -> None:
    """``le`` is what it says: less or equal; each bucket counts all below, and the last counts everything."""
    metrics.histograms["hops",].observe(number)

    counts = {
        sample.labels["le"]: sample.value
        for f in registry.collect()
        for sample in f.samples
        if sample.name.endswith("hops_bucket")
    }
    assert next(le for le, count in counts.items() if count) == bucket
    assert list(counts.values()) == sorted(counts.values())


def test_exemplars_appear_in_openmetrics(metrics: Metrics, registry: CollectorRegistry) -> None:
    """An exemplar stands at the bucket of its observation; one that is too long is refused and doesn't break the scrape."""
    metrics.histograms["hops",].observe(5, {"trace_id": "ab" * 16})
    with pytest.raises(ValueError, match="may have 128 characters"):
        metrics.histograms["hops",].observe(5, {"trace_id": "x" * 200})

    lines = [line for line in generate_openmetrics(registry).decode().splitlines() if " # {" in line]
    assert len(lines) == 1
    assert lines[0].startswith('mamba_checkpoint_hops_bucket{cache="default",le="6.0"}')
    assert f'# {{trace_id="{"ab" * 16}"}} 5.0' in lines[0]


def test_two_caches_share_a_registry(registry: CollectorRegistry) -> None:
    """Each has its own series under one family, each family stands once in the exposition, and one may close (fault 27)."""
    first = Metrics("first", registry, Containment(pytest.fail))
    second = Metrics("second", registry, Containment(pytest.fail))
    first.source = second.source = Pools()
    first.add(("lookups_total", "hit", 1))

    assert value(registry, "lookups_total", cache="first", outcome="hit") == 1
    assert value(registry, "lookups_total", cache="second", outcome="hit") == 0
    assert value(registry, "slots", cache="second", pool="active", state="free") == 8
    types = [line for line in generate_latest(registry).decode().splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types)) == len(METRICS)

    first.close()
    assert value(registry, "lookups_total", cache="first", outcome="hit") is None
    assert value(registry, "lookups_total", cache="second", outcome="hit") == 0
    second.close()


def test_a_live_name_is_refused_and_a_closed_one_free(registry: CollectorRegistry) -> None:
    """Two live caches of one name would add up unseen: the second is refused, with what to do, and does no harm to the first."""
    first = Metrics("same", registry, Containment(pytest.fail))
    first.add(("lookups_total", "hit", 1))

    with pytest.raises(ValueError, match=r"'same' already reports to this registry: close it, or give this one another name"):
        Metrics("same", registry, Containment(pytest.fail))
    assert value(registry, "lookups_total", cache="same", outcome="hit") == 1

    first.close()
    second = Metrics("same", registry, Containment(pytest.fail))
    first.close()  # closing twice must not take the series of the cache that has the name now
    assert value(registry, "lookups_total", cache="same", outcome="hit") == 0
    second.close()


def test_a_hundred_lives_leave_no_trace(registry: CollectorRegistry) -> None:
    """Creating and closing caches leaves a registry that others use exactly as it was (fault 27)."""
    Counter("foreign_total", "Somebody else's.", registry=registry).inc(7)
    before = scrape(registry)
    exposition = generate_latest(registry)

    for life in range(100):
        metrics = Metrics(f"cache-{life % 2}", registry, Containment(pytest.fail))
        metrics.source = Pools()
        metrics.add(("lookups_total", "hit", 1))
        assert value(registry, "lookups_total", cache=f"cache-{life % 2}", outcome="hit") == 1
        metrics.close()

    assert scrape(registry) == before
    assert generate_latest(registry) == exposition
    Counter("mamba_checkpoint_lookups", "The names are free, too.", registry=registry)


def test_another_cache_leaves_no_gap(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one cache reports, others come and go without taking its series out of the registry even for a moment."""
    first = Metrics("first", registry, Containment(pytest.fail))
    with monkeypatch.context() as patch:
        patch.setattr(registry, "unregister", lambda collector: pytest.fail("a scrape now would have missed the first cache"))
        Metrics("second", registry, Containment(pytest.fail)).close()

    first.close()
    assert scrape(registry) == {}


def test_a_dropped_cache_is_not_kept_alive_by_the_registry(registry: CollectorRegistry) -> None:
    """A cache that nobody closed goes, pools and all, when it is collected; its name is free then."""
    metrics = Metrics("dropped", registry, Containment(pytest.fail))
    metrics.source = Pools()
    assert value(registry, "slot_capacity", cache="dropped", pool="active") == 8

    del metrics
    gc.collect()

    assert scrape(registry) == {}
    Metrics("dropped", registry, Containment(pytest.fail)).close()


def test_the_registry_itself_can_go() -> None:
    """What is remembered about a registry doesn't keep it alive."""
    import weakref

    registry = CollectorRegistry()
    Metrics("x", registry, Containment(pytest.fail)).close()
    reference = weakref.ref(registry)

    del registry
    gc.collect()

    assert reference() is None


def test_another_owner_of_a_name_is_refused_at_construction(registry: CollectorRegistry) -> None:
    """If something else exports one of our names, construction says so, and leaves nothing behind."""
    Counter("mamba_checkpoint_lookups", "Somebody else's.", registry=registry)
    before = scrape(registry)

    with pytest.raises(ValueError, match="mamba_checkpoint_lookups"):
        Metrics("default", registry, Containment(pytest.fail))

    assert scrape(registry) == before


def test_losing_the_collector_breaks_nothing(registry: CollectorRegistry) -> None:
    """An engine that unregisters foreign collectors costs the scrape only: recording, closing, the next cache work (fault 28)."""
    metrics = Metrics("first", registry, Containment(pytest.fail))
    for collector in list(registry._collector_to_names):
        registry.unregister(collector)

    metrics.add(("lookups_total", "hit", 1))
    second = Metrics("second", registry, Containment(pytest.fail))

    assert value(registry, "lookups_total", cache="first", outcome="hit") == 1
    metrics.close()
    for collector in list(registry._collector_to_names):
        registry.unregister(collector)
    second.close()


def test_the_exposition_parses_stays_in_budget_and_names_nobody(metrics: Metrics, registry: CollectorRegistry) -> None:
    """The text parses, has no _created series, few enough series, and neither paths nor ids in any label (fault 33)."""
    metrics.source = lambda: replace(Pools()(), guard="normal")
    text = generate_latest(registry).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    assert 200 < len(samples) <= SERIES_BUDGET
    assert not [sample.name for sample in samples if sample.name.endswith("_created")]
    assert {sample.labels["cache"] for sample in samples} == {"default"}
    label_values = {value for sample in samples for value in sample.labels.values()}
    assert not [value for value in label_values if "/" in value or "\\" in value or "0x" in value]


def test_a_restricted_scrape_works(metrics: Metrics, registry: CollectorRegistry) -> None:
    """A scrape that asks for one name (?name[]=) gets that one."""
    metrics.source = Pools()
    restricted = registry.restricted_registry(["mamba_checkpoint_lookups_total", "mamba_checkpoint_slot_capacity"])

    names = {sample.name for family in restricted.collect() for sample in family.samples}

    assert names == {"mamba_checkpoint_lookups_total", "mamba_checkpoint_slot_capacity"}


def test_what_nobody_scrapes_does_not_pile_up(metrics: Metrics) -> None:
    """Numbers are settled now and then by themselves: soon where requests end, in the end also where none does."""
    for settle_from, most in ((SETTLE_EVERY, SETTLE_EVERY), (MOST_UNSETTLED, MOST_UNSETTLED)):
        for _ in range(3 * MOST_UNSETTLED):
            metrics.add(("lookups_total", "hit", 1))
            metrics.histograms["hops",].observe(1)
            metrics.publish(settle_from)
            assert len(metrics._notes) <= most
            assert len(metrics.histograms["hops",].fresh) <= most


class Busy(list):
    """Another thread appends to it at the worst moment."""

    def __getitem__(self, index: slice) -> list:
        some = super().__getitem__(index)
        self.append("late")
        return some


def test_what_comes_while_notes_are_taken_stays() -> None:
    """Taking notes loses none that is appended meanwhile."""
    notes = Busy(["early"])

    assert taken(notes) == ["early"]
    assert list(notes) == ["late"]


def test_recording_never_waits_for_a_scrape(metrics: Metrics, registry: CollectorRegistry) -> None:
    """While a scrape adds up, the recording thread goes on and leaves the rest for later; a second scrape takes its turn."""
    scraping, done = threading.Event(), threading.Event()
    outlasted: list[bool] = []

    def scrape_slowly() -> None:
        with metrics._settling:
            scraping.set()
            outlasted.append(done.wait(10))

    thread = threading.Thread(target=scrape_slowly)
    thread.start()
    scraping.wait(10)
    metrics.add(("lookups_total", "hit", 1))
    metrics.publish(settle_from=1)
    second = threading.Thread(target=metrics.collect)
    second.start()
    second.join(0.2)
    waited = second.is_alive()
    done.set()
    thread.join()
    second.join()

    assert outlasted == [True]
    assert waited
    assert value(registry, "lookups_total", outcome="hit") == 1


def test_scrapes_during_work_always_add_up(metrics: Metrics, registry: CollectorRegistry) -> None:
    """In every scrape, while slots move, numbers are noted and settled and caches come and go: states add up to the capacity,
    nothing is counted twice, lost or taken back.
    """
    pools = Pools()
    metrics.source = pools
    torn: list[object] = []
    stop = threading.Event()

    hits = ("mamba_checkpoint_lookups_total", frozenset({("cache", "default"), ("outcome", "hit")}))
    count = ("mamba_checkpoint_hops_count", frozenset({("cache", "default")}))
    bucket = ("mamba_checkpoint_hops_bucket", frozenset({("cache", "default"), ("le", "+Inf")}))

    def scrape_until_stopped() -> None:
        seen = 0.0, 0.0
        while not stop.is_set():
            try:
                samples = scrape(registry)
                slots = sum(
                    v for (name, labels), v in samples.items() if name.endswith("_slots") and ("pool", "checkpoint") in labels
                )
                if slots != 16:
                    torn.append(slots)
                now = samples[hits], samples[count]
                if now < seen or samples[count] != samples[bucket]:
                    torn.append((seen, now, samples[bucket]))
                seen = now
            except Exception as error:  # noqa: BLE001 a thread's exception would be lost
                torn.append(error)

    threads = [threading.Thread(target=scrape_until_stopped) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns at every chance
    for thread in threads:
        thread.start()
    try:
        for step in range(3000):
            free = step % 17
            pools.checkpoint = (free, 0, 16 - free, 0)
            metrics.add(("lookups_total", "hit", 1))
            metrics.histograms["hops",].observe(step % 5)
            metrics.publish(settle_from=7)
            if step % 50 == 0:
                Metrics("passing", registry, Containment(torn.append)).close()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)

    assert torn == [], (len(torn), torn[:3])
    assert value(registry, "lookups_total", outcome="hit") == value(registry, "hops_count") == 3000
    assert value(registry, "hops_sum") == 6000
