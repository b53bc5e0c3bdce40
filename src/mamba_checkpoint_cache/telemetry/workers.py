"""Several worker processes scraped as one, through the files of prometheus_client's multiprocess mode.

That mode knows no collectors, only its own metrics, whose values lie in mapped files. So each number is kept twice: in memory,
and in the file of this process. Counters and histograms of all workers that ever were add up; gauges are written when slots have
moved, and are those of the workers that live.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import SupportsFloat

import prometheus_client as prometheus

from mamba_checkpoint_cache.telemetry.catalogue import METRICS, Metric
from mamba_checkpoint_cache.telemetry.instruments import Counter, Histogram

DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
ROOM_BYTES = 2**19
"""More than the files of one cache take."""
ANY_WORKER = ("info", "guard_mode")
"""Gauges that are 1 if they are so in any live worker; the others are sums over the live workers."""

Readings = Mapping[str, Mapping[tuple[str, ...], SupportsFloat]]


def is_one_of_many() -> bool:
    """Whether this process was started as a worker whose numbers go to files."""
    return DIRECTORY in os.environ


def require_room() -> None:
    """Raise :class:`OSError` unless the files can be had: a write to a mapped file that the disk can't hold ends the process."""
    with TemporaryFile(dir=os.environ[DIRECTORY]) as probe:
        os.posix_fallocate(probe.fileno(), 0, ROOM_BYTES)


def claim_room() -> None:
    """Have the disk hold this worker's files in full, so that what is written later is sure to have its place."""
    for path in Path(os.environ[DIRECTORY]).glob(f"*_{os.getpid()}.db"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


class WorkerCounter(Counter):
    """A counter that is in this worker's file too."""

    def __init__(self, metric: Metric, labels: dict[str, str], parents: dict[str, prometheus.Counter]) -> None:
        super().__init__(metric.full_name, labels)
        if metric.name not in parents:
            parents[metric.name] = prometheus.Counter(metric.full_name, metric.help, metric.label_names, registry=None)
        self._file = parents[metric.name].labels(*labels.values())

    def inc(self, amount: float = 1.0) -> None:
        """Add a number that is at least 0."""
        super().inc(amount)
        self._file.inc(amount)


class WorkerHistogram(Histogram):
    """A histogram that is in this worker's file too, without exemplars, which files have no place for."""

    def __init__(self, metric: Metric, labels: dict[str, str], parents: dict[str, prometheus.Histogram]) -> None:
        super().__init__(metric.full_name, labels, metric.buckets)
        if metric.name not in parents:
            parents[metric.name] = prometheus.Histogram(
                metric.full_name, metric.help, metric.label_names, buckets=metric.buckets, registry=None
            )
        self._file = parents[metric.name].labels(*labels.values())

    def observe(self, value: float, exemplar: dict[str, str] | None = None) -> None:
        """Count a number that is at least 0."""
        super().observe(value, exemplar)
        self._file.observe(value)


class WorkerGauges:
    """The gauges of one cache in this worker's files."""

    def __init__(self, cache: str) -> None:
        self._cache = cache
        self._written: dict[tuple[str, tuple[str, ...]], float] = {}
        self._gauges = {
            metric.name: prometheus.Gauge(
                metric.full_name,
                metric.help,
                metric.label_names,
                multiprocess_mode="livemax" if metric.name in ANY_WORKER else "livesum",
                registry=None,
            )
            for metric in METRICS
            if metric.type == "gauge"
        }

    def write(self, readings: Readings) -> None:
        """Write what has changed; what is not among the readings any more becomes 0, since a file forgets nothing."""
        first = not self._written
        now = {(name, values): float(reading) for name, series in readings.items() for values, reading in series.items()}
        for key in [*now, *(self._written.keys() - now.keys())]:
            number = now.get(key, 0.0)
            if self._written.get(key) != number:
                name, values = key
                self._gauges[name].labels(self._cache, *values).set(number)
                self._written[key] = number
        if first:
            claim_room()
