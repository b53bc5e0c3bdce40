"""The numbers of one process: noted by one thread in passing, and added up later, many at once.

prometheus_client's own take a lock for each increment, which a process that forks while a scrape holds it never gets back. And
a small commit has a dozen numbers to note: to work out sums and buckets between its other steps took a fifth of its time.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import accumulate, repeat
from math import inf
from typing import Any, TypeVar

from prometheus_client.samples import Exemplar, Sample
from prometheus_client.utils import floatToGoString

T = TypeVar("T")

MAX_EXEMPLAR = 128
"""Characters of an exemplar's names and values together, as OpenMetrics allows."""


class Counter:
    """A sum that only grows."""

    file: Any = None
    """Where a worker process keeps it for the others, a counter of prometheus_client."""

    def __init__(self, name: str, labels: dict[str, str]) -> None:
        self.name = name
        self.labels = labels
        self.reset()

    def reset(self) -> None:
        """Start from 0, in no file."""
        self.value = 0.0
        self.file = None

    def inc(self, amount: float = 1.0) -> None:
        """Add a number that is at least 0."""
        self.value += amount
        if self.file is not None:
            self.file.inc(amount)

    def samples(self) -> Iterator[Sample]:
        """The one sample."""
        yield Sample(self.name, self.labels, self.value)


class Histogram:
    """Observations by bucket, each with the exemplar that was seen last. ``fresh`` are those that no bucket counts yet."""

    file: Any = None
    """Where a worker process keeps it for the others, a histogram of prometheus_client: without exemplars."""

    def __init__(self, name: str, labels: dict[str, str], bounds: tuple[float, ...]) -> None:
        self.name = name
        self.labels = labels
        self.fresh: list[float] = []
        self._seen: list[Exemplar] = []
        self._bounds = bounds
        self._bucket_labels = [{**labels, "le": _text(bound)} for bound in (*bounds, inf)]
        self.reset()

    def reset(self) -> None:
        """Start from nothing, in no file."""
        self.fresh.clear()
        self._seen.clear()
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._exemplars: list[Exemplar | None] = [None] * (len(self._bounds) + 1)
        self.file = None

    def observe(self, value: float, exemplar: dict[str, str] | None = None) -> None:
        """Note a number. Raises :class:`ValueError` if there is an exemplar and it has more than 128 characters."""
        self.fresh.append(value)
        if exemplar is not None:
            if sum(len(name) + len(text) for name, text in exemplar.items()) > MAX_EXEMPLAR:
                raise ValueError(f"an exemplar may have {MAX_EXEMPLAR} characters, got {exemplar}")
            self._seen.append(Exemplar(exemplar, finite(value), time.time()))

    def settle(self, refused: Callable[[Exception], None]) -> None:
        """Count what is fresh; what is no number, not finite or below 0 is ``refused``: it would poison the sum for good."""
        values = _finite_only(taken(self.fresh), refused)
        for place, times in Tally(map(bisect_left, repeat(self._bounds), values)).items():
            self._counts[place] += times
        self._sum += sum(values)
        for exemplar in taken(self._seen):
            self._exemplars[bisect_left(self._bounds, exemplar.value)] = exemplar
        if self.file is not None:
            for value in values:
                self.file.observe(value)

    def samples(self) -> Iterator[Sample]:
        """Buckets, count and sum; the count is the last bucket's, whatever is counted meanwhile."""
        counts = list(accumulate(list(self._counts)))
        for labels, count, exemplar in zip(self._bucket_labels, counts, self._exemplars, strict=True):
            yield Sample(f"{self.name}_bucket", labels, float(count), None, exemplar)
        yield Sample(f"{self.name}_count", self.labels, float(counts[-1]))
        yield Sample(f"{self.name}_sum", self.labels, self._sum)


def taken(notes: list[T]) -> list[T]:
    """Take what is in a list, to which another thread may be appending: what comes meanwhile stays."""
    some = notes[:]
    del notes[: len(some)]
    return some


def finite(value: Any) -> float:
    """As a plain float, also a numpy or torch scalar. Raises :class:`ValueError` unless it is finite and at least 0."""
    number = float(value)
    if not 0.0 <= number < inf:
        raise ValueError(f"expected a finite number, at least 0, got {number}")
    return number


def _finite_only(values: list[Any], refused: Callable[[Exception], None]) -> list[float]:
    """Those that :func:`finite` takes. One look at all of them is enough as a rule: a NaN or an infinity shows in the sum."""
    with suppress(TypeError, ValueError):
        numbers = list(map(float, values))
        if min(numbers, default=0.0) >= 0.0 and sum(numbers) < inf:
            return numbers
    numbers = []
    for value in values:
        try:
            numbers.append(finite(value))
        except Exception as error:  # noqa: BLE001
            refused(error)
    return numbers


def _text(bound: float) -> str:
    text: str = floatToGoString(bound)  # type: ignore[no-untyped-call]
    return text
