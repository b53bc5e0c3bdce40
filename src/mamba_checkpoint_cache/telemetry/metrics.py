"""The metrics of one cache, built from the catalogue into a registry that several caches may share.

Each cache owns its numbers; one collector per registry merges them by name at scrape time. So two caches never collide, a
closed cache leaves nothing behind, and the gauges are the pools as they are at the scrape.
"""

from __future__ import annotations

import os
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from sys import float_info
from threading import Lock, RLock
from typing import Any, SupportsFloat
from weakref import WeakKeyDictionary, WeakValueDictionary

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.core import Metric as Family

from mamba_checkpoint_cache.telemetry.catalogue import (
    BYTE_KINDS,
    GUARD_MODES,
    METRICS,
    OPERATIONS,
    SLOT_STATES,
    VERSION,
    GuardMode,
    Metric,
    Pool,
)
from mamba_checkpoint_cache.telemetry.containment import Containment
from mamba_checkpoint_cache.telemetry.instruments import Counter, Histogram, finite, taken
from mamba_checkpoint_cache.telemetry.workers import WorkerFiles, WorkerGauges, claim_room, is_one_of_many, require_room

SETTLE_EVERY = 128
"""Operations between two settlements: about a thousand notes, a tenth of a millisecond. It comes when a request has ended."""
MOST_UNSETTLED = 2048
"""Operations after which it comes at once: no request has ended for long."""
_METRICS = {metric.name: metric for metric in METRICS}


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """One pool at one moment: ``counts`` are its free, reserved, evictable and locked slots, which add up to ``capacity``."""

    name: Pool
    capacity: int
    counts: tuple[int, ...]
    bytes_reserved: int
    bytes_occupied: int
    bytes_native_equivalent: int


@dataclass(frozen=True, slots=True)
class PoolsSnapshot:
    """All pools of a cache at one moment; ``info`` has the keys codec, state_dtype and fingerprint; ``guard`` is its mode.

    ``layers``: recurrent layers by the format that checkpoints keep them in. ``ceilings``: the guard's, by kind.
    """

    pools: tuple[PoolSnapshot, ...]
    info: Mapping[str, str]
    guard: GuardMode | None = None
    layers: Mapping[str, int] = field(default_factory=dict)
    ceilings: Mapping[str, float] = field(default_factory=dict)


class Metrics:
    """The metrics of one cache: every counter and histogram exists, at 0, from construction until ``close``.

    A counter is named by its metric, then its label values in the catalogue's order, and is added to by a note of that and the
    amount: ``add(("misses_total", "evicted", 1))``. Notes are settled, which is when they are looked at, at every scrape and now
    and then between. What can't be settled, and what a scrape can't do, ends in ``contained``. The registry holds this object
    weakly, so that a cache which is dropped without being closed takes its series along.

    Raises:
        ValueError: at construction, if a live cache of that name reports to ``registry``, or something else there owns one
            of the names.
    """

    def __init__(self, cache: str, registry: CollectorRegistry, contained: Containment) -> None:
        self.cache = cache
        self.source: Callable[[], PoolsSnapshot] | None = None
        self._registry = registry
        self._contained = contained
        self._gauges_of_worker: WorkerGauges | None = None
        self._notes: list[tuple[Any, ...]] = []
        self.add = self._notes.append
        self._unsettled = 0
        self._settling = RLock()
        self._counters: dict[tuple[str, ...], Counter] = {}
        self.histograms: dict[tuple[str, ...], Histogram] = {}
        for series, metric, labels in _all_series(cache):
            if metric.type == "counter":
                self._counters[series] = Counter(metric.full_name, labels)
            elif metric.type == "histogram":
                self.histograms[series] = Histogram(metric.full_name, labels, metric.buckets)
        self.errors = self._counters["telemetry_errors_total",]
        self.seconds: dict[str, Histogram] = {name: self.histograms["operation_seconds", name] for name in OPERATIONS}
        _attach(registry, self)

    def share(self) -> None:
        """Keep the numbers in this worker's files as well, if it is one of many. Raises :class:`OSError` if there is no room."""
        if is_one_of_many():
            require_room()
            files = WorkerFiles()
            found = [
                (instrument, files.open(_METRICS[series[0]], instrument.labels)) for series, instrument in self._instruments()
            ]
            claim_room()
            self._gauges_of_worker = WorkerGauges(self.cache)
            for instrument, file in found:
                instrument.file = file

    def after_fork(self) -> None:
        """Start from 0 in a child process: what the parent has counted, the parent exposes."""
        shared, self._gauges_of_worker = self._gauges_of_worker is not None, None
        self._settling = RLock()  # a scrape of the parent's may have held it
        self._notes.clear()
        for _, instrument in self._instruments():
            instrument.reset()
        if shared:
            with self._contained:
                self.share()

    def publish(self, settle_from: int = MOST_UNSETTLED) -> None:
        """An operation has ended: settle if so many have; as one of many workers at once, for the scrape reads the files."""
        self._unsettled += 1
        if self._gauges_of_worker is not None or self._unsettled >= settle_from:
            if self._settling.acquire(blocking=False):  # else a scrape is settling
                try:
                    self._settle()
                finally:
                    self._settling.release()
            if self._gauges_of_worker is not None and self.source is not None:
                with self._contained:
                    self._gauges_of_worker.write(_read(self.source()))

    def close(self) -> None:
        """Take the series out of the registry; may be called twice."""
        self.source = None
        _detach(self._registry, self)
        if self._gauges_of_worker is not None:
            self._gauges_of_worker.write({})

    def collect(self) -> Iterable[Family]:
        """All families of this cache."""
        gauges = self._gauges()
        families: dict[str, Family] = {}
        with self._settling:
            self._settle()
            for series, instrument in self._instruments():
                metric = _METRICS[series[0]]
                family = families.setdefault(metric.name, _family(metric))
                family.samples += instrument.samples()
        return [*gauges, *families.values()]

    def _settle(self) -> None:
        """Add up what was noted. Alike notes are first counted, in C."""
        self._unsettled = 0
        with self._contained:
            for (*series, amount), times in _tally(taken(self._notes)):
                try:
                    self._counters[tuple(series)].inc(times * finite(amount))
                except Exception as error:  # noqa: BLE001
                    for _ in range(times):
                        self._contained.on_error(error)
            for histogram in self.histograms.values():
                if histogram.fresh:
                    histogram.settle(self._contained.on_error)

    def _instruments(self) -> Iterator[tuple[tuple[str, ...], Counter | Histogram]]:
        yield from self._counters.items()
        yield from self.histograms.items()

    def _gauges(self) -> list[Family]:
        """The gauges, all from one snapshot; none at all if it can't be taken, since an old value would be a lie."""
        source = self.source
        if source is None:
            return []
        with self._contained:
            readings = _read(source())
            return [self._gauge(metric, readings[metric.name]) for metric in METRICS if metric.type == "gauge"]
        return []

    def _gauge(self, metric: Metric, readings: Mapping[tuple[str, ...], SupportsFloat]) -> Family:
        family = GaugeMetricFamily(metric.full_name, metric.help, labels=metric.label_names, unit=metric.unit)
        for values, reading in readings.items():
            for label, value in zip(metric.labels, values, strict=True):
                if label.values and value not in label.values:
                    raise ValueError(f"label {label.name} of {metric.full_name} must be one of {label.values}, got {value!r}")
            family.add_metric([self.cache, *values], finite(reading))
        return family


class _Exposition:
    """The collector that one registry sees: the caches that report to it, merged into one family per name."""

    def __init__(self) -> None:
        self.caches: WeakValueDictionary[str, Metrics] = WeakValueDictionary()

    def describe(self) -> Iterable[Family]:
        """The families without samples: the names that the registry guards against a second owner."""
        return map(_family, METRICS)

    def collect(self) -> Iterable[Family]:
        """One family per name with the samples of every cache."""
        merged: dict[str, Family] = {}
        live = [metrics for reference in self.caches.valuerefs() if (metrics := reference()) is not None]
        for metrics in live:
            for family in metrics.collect():
                if family.name in merged:
                    merged[family.name].samples += family.samples
                else:
                    merged[family.name] = family
        return merged.values()


_expositions: WeakKeyDictionary[CollectorRegistry, _Exposition] = WeakKeyDictionary()
_attaching = Lock()


def _after_fork() -> None:
    _attaching.release()
    for exposition in list(_expositions.values()):
        for metrics in list(exposition.caches.values()):
            metrics.after_fork()


os.register_at_fork(before=_attaching.acquire, after_in_parent=_attaching.release, after_in_child=_after_fork)


def _attach(registry: CollectorRegistry, metrics: Metrics) -> None:
    with _attaching:
        exposition = _expositions.setdefault(registry, _Exposition())
        if metrics.cache in exposition.caches:
            raise ValueError(
                f"a live cache named {metrics.cache!r} already reports to this registry: close it, or give this one another name"
            )
        alone = not exposition.caches
        if alone:
            _unregister(registry, exposition)  # its caches may have been dropped without being closed
        try:
            registry.register(exposition)  # each time, since others can have unregistered it
        except ValueError:
            if alone:
                raise
        exposition.caches[metrics.cache] = metrics


def _detach(registry: CollectorRegistry, metrics: Metrics) -> None:
    with _attaching:
        exposition = _expositions[registry]
        if exposition.caches.get(metrics.cache) is metrics:
            del exposition.caches[metrics.cache]
        if not exposition.caches:
            _unregister(registry, exposition)


def _unregister(registry: CollectorRegistry, exposition: _Exposition) -> None:
    with suppress(KeyError):
        registry.unregister(exposition)


def _family(metric: Metric) -> Family:
    return Family(metric.full_name.removesuffix("_total"), metric.help, metric.type, metric.unit)


def _all_series(cache: str) -> Iterator[tuple[tuple[str, ...], Metric, dict[str, str]]]:
    """Every series of a counter or a histogram: what it is called here, its metric, its labels."""
    for metric in METRICS:
        for values in product(*(label.values for label in metric.labels)):
            yield (metric.name, *values), metric, dict(zip(metric.label_names, (cache, *values), strict=True))


def _tally(notes: list[tuple[Any, ...]]) -> Iterable[tuple[tuple[Any, ...], int]]:
    try:
        return Tally(notes).items()
    except TypeError:  # one of them has something in it that has no hash, and is to be refused alone
        return [(note, 1) for note in notes]


def _read(snapshot: PoolsSnapshot) -> dict[str, dict[tuple[str, ...], SupportsFloat]]:
    """The readings of every gauge, by name and label values."""
    pools, info = snapshot.pools, snapshot.info
    return {
        "info": {(info["codec"], info["state_dtype"], VERSION, info["fingerprint"]): 1},
        "slots": {(pool.name, state): n for pool in pools for state, n in zip(SLOT_STATES, pool.counts, strict=True)},
        "slot_capacity": {(pool.name,): pool.capacity for pool in pools},
        "bytes": {(pool.name, kind): getattr(pool, f"bytes_{kind}") for pool in pools for kind in BYTE_KINDS},
        "layers": {(codec,): count for codec, count in snapshot.layers.items()},
        "guard_mode": {(mode,): mode == snapshot.guard for mode in GUARD_MODES if snapshot.guard is not None},
        # A ceiling may be infinite, a gauge not.
        "drift_budget": {(kind,): min(ceiling, float_info.max) for kind, ceiling in snapshot.ceilings.items()},
    }
