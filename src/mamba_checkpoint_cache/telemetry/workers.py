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
from typing import Any, SupportsFloat

import prometheus_client as prometheus

from mamba_checkpoint_cache.telemetry.catalogue import METRICS, Metric

DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
ROOM_BYTES = 2**19
"""More than the files of one cache take."""
ANY_WORKER = ("info", "guard_mode", "drift_budget")
"""Gauges that are the greatest of all live workers', so 1 if they are so in any; the others are sums over the live workers."""

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


class WorkerFiles:
    """The counters and histograms of one cache in this worker's files."""

    def __init__(self) -> None:
        self._families: dict[str, Any] = {}

    def open(self, metric: Metric, labels: dict[str, str]) -> Any:
        """The counter or histogram of prometheus_client for one series."""
        if metric.name not in self._families:
            names = (metric.full_name, metric.help, metric.label_names)
            self._families[metric.name] = (
                prometheus.Counter(*names, registry=None)
                if metric.type == "counter"
                else prometheus.Histogram(*names, buckets=metric.buckets, registry=None)
            )
        return self._families[metric.name].labels(*labels.values())


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
