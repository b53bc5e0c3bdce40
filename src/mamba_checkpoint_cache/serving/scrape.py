"""Reading numbers back from ``/metrics``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isinf

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from mamba_checkpoint_cache.telemetry.catalogue import PREFIX


class Scrape:
    """The samples of one scrape; names are given without the package's prefix, and all caches are added up."""

    def __init__(self, exposition: str) -> None:
        self._samples = [sample for family in text_string_to_metric_families(exposition) for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples that carry ``labels``. Raises :class:`KeyError` if there are none."""
        values = [sample.value for sample in self._matching(name, labels)]
        if not values:
            raise KeyError(f"{PREFIX}_{name}{labels}")
        return sum(values)

    def by(self, name: str, label: str, **labels: str) -> dict[str, int]:
        """The samples that carry ``labels``, added up by the value of ``label``."""
        sums: dict[str, int] = defaultdict(int)
        for sample in self._matching(name, labels):
            sums[sample.labels[label]] += int(sample.value)
        return dict(sums)

    def histogram(self, name: str, **labels: str) -> Histogram:
        """The buckets of a histogram."""
        counts: dict[float, float] = defaultdict(float)
        for sample in self._matching(f"{name}_bucket", labels):
            counts[float(sample.labels["le"])] += sample.value
        return Histogram(sorted(counts.items()))

    def _matching(self, name: str, labels: dict[str, str]) -> Iterator[Sample]:
        full_name = f"{PREFIX}_{name}"
        return (s for s in self._samples if s.name == full_name and labels.items() <= s.labels.items())


@dataclass(frozen=True, slots=True)
class Histogram:
    """Upper bounds and cumulative counts, in ascending order; the last bound is infinite."""

    buckets: Sequence[tuple[float, float]]

    def quantile(self, q: float) -> float | None:
        """The value that a share ``q`` of the observations does not exceed, as far as buckets tell.

        Within a bucket observations are taken to be spread evenly, so that ``q`` = 1 gives the upper bound of the highest bucket
        in use. None if there are no observations, or the answer lies above the last finite bound.
        """
        total = self.buckets[-1][1] if self.buckets else 0
        if not total:
            return None
        rank = q * total
        for (lower, below), (upper, up_to) in pairwise(((-inf, 0.0), *self.buckets)):
            if up_to >= rank and up_to > below:
                if isinf(upper):
                    return None
                return upper if isinf(lower) else lower + (upper - lower) * (rank - below) / (up_to - below)
        return None
