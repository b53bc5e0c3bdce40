"""The numbers of one process, without locks: one thread records them, and any thread may read.

prometheus_client's own take a lock for each increment, which a process that forks while a scrape holds it never gets back,
and ten of them are much of the time of a small commit.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from math import inf

from prometheus_client.samples import Exemplar, Sample
from prometheus_client.utils import floatToGoString

MAX_EXEMPLAR = 128
"""Characters of an exemplar's names and values together, as OpenMetrics allows."""


class Counter:
    """A sum that only grows."""

    def __init__(self, name: str, labels: dict[str, str]) -> None:
        self.value = 0.0
        self._name = name
        self._labels = labels

    def inc(self, amount: float = 1.0) -> None:
        """Add a number that is at least 0."""
        self.value += amount

    def samples(self) -> Iterator[Sample]:
        """The one sample."""
        yield Sample(self._name, self._labels, self.value)


class Histogram:
    """Observations by bucket, each with the exemplar that was seen last."""

    def __init__(self, name: str, labels: dict[str, str], bounds: tuple[float, ...]) -> None:
        self._name = name
        self._labels = labels
        self._bounds = bounds
        self._bucket_labels = [{**labels, "le": _text(bound)} for bound in (*bounds, inf)]
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._exemplars: list[Exemplar | None] = [None] * (len(bounds) + 1)

    def observe(self, value: float, exemplar: dict[str, str] | None = None) -> None:
        """Count a number that is at least 0."""
        place = bisect_left(self._bounds, value)
        self._counts[place] += 1
        self._sum += value
        if exemplar is not None:
            if sum(len(name) + len(text) for name, text in exemplar.items()) > MAX_EXEMPLAR:
                raise ValueError(f"an exemplar may have {MAX_EXEMPLAR} characters, got {exemplar}")
            self._exemplars[place] = Exemplar(exemplar, value, time.time())

    def samples(self) -> Iterator[Sample]:
        """Buckets, count and sum; the count is the last bucket's, whatever is observed meanwhile."""
        counts = list(accumulate(list(self._counts)))
        for labels, count, exemplar in zip(self._bucket_labels, counts, self._exemplars, strict=True):
            yield Sample(f"{self._name}_bucket", labels, float(count), None, exemplar)
        yield Sample(f"{self._name}_count", self._labels, float(counts[-1]))
        yield Sample(f"{self._name}_sum", self._labels, self._sum)


def _text(bound: float) -> str:
    text: str = floatToGoString(bound)  # type: ignore[no-untyped-call]
    return text
