"""The metrics of one cache, built from the catalogue into a registry that several caches may share.

Each cache owns its prometheus objects; one collector per registry merges them by name at scrape time. So two caches never
collide, a closed cache leaves nothing behind, and the gauges are the pools as they are at the scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from math import inf
from threading import Lock
from typing import Any, SupportsFloat, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.core import Metric as Family

from mamba_checkpoint_cache.telemetry.catalogue import (
    BYTE_KINDS,
    GUARD_MODES,
    METRICS,
    SLOT_STATES,
    VERSION,
    GuardMode,
    Metric,
    Pool,
)
from mamba_checkpoint_cache.telemetry.containment import Containment

Instrument = TypeVar("Instrument", Counter, Histogram)


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
    """All pools of a cache at one moment; ``info`` has the keys codec, state_dtype and fingerprint; ``guard`` is its mode."""

    pools: tuple[PoolSnapshot, ...]
    info: Mapping[str, str]
    guard: GuardMode | None = None


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
        self._families: list[Counter | Histogram] = []
        self._counters: dict[tuple[str, ...], Counter] = {}
        self._histograms: dict[tuple[str, ...], Histogram] = {}
        for metric in METRICS:
            if metric.type == "counter":
                self._bind(metric, Counter(**_arguments(metric)), self._counters)
            elif metric.type == "histogram":
                self._bind(metric, Histogram(**_arguments(metric), buckets=metric.buckets), self._histograms)
        self.errors = self._counters["telemetry_errors_total",]
        _attach(registry, self)

    def add(self, *series: str, amount: SupportsFloat = 1.0) -> None:
        """Add to a counter; the amount is finite and at least 0."""
        try:  # entering ``contained`` would cost half as much as the increment
            self._counters[series].inc(_number(amount))
        except Exception as error:  # noqa: BLE001
            self._contained.on_error(error)

    def observe(self, *series: str, value: SupportsFloat, exemplar: dict[str, str] | None = None) -> None:
        """Put a value, finite and at least 0, into a histogram; ``exemplar`` holds at most 128 characters."""
        try:
            self._histograms[series].observe(_number(value), exemplar)
        except Exception as error:  # noqa: BLE001
            self._contained.on_error(error)

    def close(self) -> None:
        """Take the series out of the registry; may be called twice."""
        self.source = None
        _detach(self._registry, self)

    def collect(self) -> Iterator[Family]:
        """All families of this cache, without the ``_created`` samples that would double the exposition."""
        yield from self._gauges()
        for instrument in self._families:
            for family in instrument.collect():
                family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
                yield family

    def _bind(self, metric: Metric, instrument: Instrument, children: dict[tuple[str, ...], Instrument]) -> None:
        self._families.append(instrument)
        for combination in product([metric.name], *(label.values for label in metric.labels)):
            children[combination] = instrument.labels(self.cache, *combination[1:])

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
        return [Family(metric.full_name.removesuffix("_total"), metric.help, metric.type) for metric in METRICS]

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


def _arguments(metric: Metric) -> dict[str, Any]:
    return {
        "name": metric.full_name,
        "documentation": metric.help,
        "labelnames": metric.label_names,
        "unit": metric.unit,
        "registry": None,
    }


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
        "guard_mode": {(mode,): mode == snapshot.guard for mode in GUARD_MODES if snapshot.guard is not None},
    }
