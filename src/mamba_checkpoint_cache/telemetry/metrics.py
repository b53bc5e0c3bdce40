"""The metrics of one cache, built from the catalogue into a registry that several caches may share.

Each cache owns its numbers; one collector per registry merges them by name at scrape time. So two caches never collide, a
closed cache leaves nothing behind, and the gauges are the pools as they are at the scrape.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from math import inf
from threading import Lock
from typing import SupportsFloat
from weakref import WeakKeyDictionary, WeakValueDictionary

import prometheus_client
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
from mamba_checkpoint_cache.telemetry.instruments import Counter, Histogram
from mamba_checkpoint_cache.telemetry.workers import (
    WorkerCounter,
    WorkerGauges,
    WorkerHistogram,
    claim_room,
    is_one_of_many,
    require_room,
)

ONE = 1.0
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

    ``layers``: recurrent layers by the format that checkpoints keep them in.
    """

    pools: tuple[PoolSnapshot, ...]
    info: Mapping[str, str]
    guard: GuardMode | None = None
    layers: Mapping[str, int] = field(default_factory=dict)


class Metrics:
    """The metrics of one cache: every counter and histogram exists, at 0, from construction until ``close``.

    A series is named by its metric and then its label values, in the catalogue's order: ``add("misses_total", "evicted")``.
    Whatever ``add``, ``observe`` or a scrape can't do ends in ``contained``; none of them raises. The registry holds this
    object weakly, so that a cache which is dropped without being closed takes its series along.

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
        self._build(in_files=False)
        _attach(registry, self)

    def share(self) -> None:
        """Keep the numbers in this worker's files as well, if it is one of many. Raises :class:`OSError` if there is no room."""
        if is_one_of_many():
            require_room()
            self._build(in_files=True)
            claim_room()
            self._gauges_of_worker = WorkerGauges(self.cache)

    def after_fork(self) -> None:
        """Start from 0 in a child process: what the parent has counted, the parent exposes."""
        shared, self._gauges_of_worker = self._gauges_of_worker is not None, None
        self._build(in_files=False)
        if shared:
            with self._contained:
                self.share()

    def publish(self) -> None:
        """Write the gauges where the other workers' are, which is nowhere unless this is one of many."""
        if self._gauges_of_worker is not None and self.source is not None:
            with self._contained:
                self._gauges_of_worker.write(_read(self.source()))

    def add(self, *series: str, amount: SupportsFloat = ONE) -> None:
        """Add to a counter: 1, or an amount that is finite and at least 0."""
        try:  # entering ``contained`` would cost as much as the increment
            self._counters[series].inc(ONE if amount is ONE else _number(amount))
        except Exception as error:  # noqa: BLE001
            self._contained.on_error(error)

    def observe(self, *series: str, value: SupportsFloat, exemplar: dict[str, str] | None = None) -> None:
        """Put a value, finite and at least 0, into a histogram; ``exemplar`` holds at most 128 characters."""
        try:
            self._histograms[series].observe(_number(value), exemplar)
        except Exception as error:  # noqa: BLE001
            self._contained.on_error(error)

    def took(self, operation: str, seconds: float, exemplar: dict[str, str] | None) -> None:
        """Observe how long an operation took. May raise: its caller, who calls most often of all, contains that."""
        if not 0.0 <= seconds < inf:
            raise ValueError(f"{operation} can't have taken {seconds} seconds")
        self._seconds[operation].observe(seconds, exemplar)

    def close(self) -> None:
        """Take the series out of the registry; may be called twice."""
        self.source = None
        _detach(self._registry, self)
        if self._gauges_of_worker is not None:
            self._gauges_of_worker.write({})

    def collect(self) -> Iterator[Family]:
        """All families of this cache."""
        yield from self._gauges()
        families: dict[str, Family] = {}
        for instruments in (self._counters, self._histograms):
            for series, instrument in instruments.items():
                metric = _METRICS[series[0]]
                family = families.setdefault(metric.name, _family(metric))
                family.samples += instrument.samples()
        yield from families.values()

    def _build(self, *, in_files: bool) -> None:
        counters: dict[tuple[str, ...], Counter] = {}
        histograms: dict[tuple[str, ...], Histogram] = {}
        counter_files: dict[str, prometheus_client.Counter] = {}
        histogram_files: dict[str, prometheus_client.Histogram] = {}
        for series, metric, labels in _all_series(self.cache):
            if metric.type == "counter":
                plain = Counter(metric.full_name, labels)
                counters[series] = WorkerCounter(metric, labels, counter_files) if in_files else plain
            elif metric.type == "histogram":
                observed = Histogram(metric.full_name, labels, metric.buckets)
                histograms[series] = WorkerHistogram(metric, labels, histogram_files) if in_files else observed
        self._counters, self._histograms = counters, histograms
        self.errors = counters["telemetry_errors_total",]
        self._seconds: dict[str, Histogram] = {name: histograms["operation_seconds", name] for name in OPERATIONS}

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
            family.add_metric([self.cache, *values], _number(reading))
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


def _number(value: SupportsFloat) -> float:
    """As a plain float: one NaN would poison a sum for good, and a numpy or torch scalar would stay one."""
    number = float(value)
    if not 0.0 <= number < inf:
        raise ValueError(f"expected a finite number, at least 0, got {number}")
    return number


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
    }
