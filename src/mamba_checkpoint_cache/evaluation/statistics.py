"""Means, percentiles and intervals of figures that come in groups: the positions of one prompt are not independent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import torch
from torch import Tensor

CONFIDENCE = 0.95
RESAMPLES = 2000

Interval = tuple[float, float]


def percentile(values: Tensor, share: float) -> float:
    """The value that a ``share`` of ``values`` lies at or under; NaN if any is NaN."""
    return float(values.double().quantile(share, interpolation="higher"))


def bootstrap_interval(groups: Sequence[float], *, over: Sequence[float] | None = None, seed: int = 0) -> Interval | None:
    """The 95 % interval of the mean of one figure per prompt: percentiles of means of prompts drawn with replacement.

    With ``over``, another figure of the same prompts: that of the ratio of the two means, of prompts drawn for both alike.
    None for fewer than two prompts, or where a figure or a ratio is not finite: there is nothing to tell how far they scatter.
    """
    values = torch.tensor([groups] if over is None else [groups, over], dtype=torch.float64)
    count = values.shape[-1]
    if count < 2 or not bool(values.isfinite().all()):
        return None
    drawn = torch.randint(count, (RESAMPLES, count), generator=torch.Generator().manual_seed(seed))
    means = values[:, drawn].mean(-1)
    found = means[0] if over is None else means[0] / means[1]
    if not bool(found.isfinite().all()):
        return None
    tail = (1 - CONFIDENCE) / 2
    return float(found.quantile(tail)), float(found.quantile(1 - tail))


def wilson_interval(right: int, asked: int) -> Interval:
    """The 95 % interval of a share, ``right`` of ``asked``: Wilson's score interval, which also holds near 0 and 1."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    share, scale = right / asked, 1 + z * z / asked
    centre = (share + z * z / (2 * asked)) / scale
    spread = z / scale * math.sqrt(share * (1 - share) / asked + z * z / (4 * asked * asked))
    return max(0.0, min(share, centre - spread)), min(1.0, max(share, centre + spread))
