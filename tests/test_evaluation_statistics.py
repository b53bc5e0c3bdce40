"""Intervals and percentiles against formulae written out by hand."""

from __future__ import annotations

import math
import random
from statistics import mean, stdev

import pytest
import torch

from mamba_checkpoint_cache.evaluation.statistics import bootstrap_interval, percentile, wilson_interval


@pytest.mark.parametrize(("share", "expected"), [(0.95, 95.0), (0.99, 99.0), (0.5, 50.0), (1.0, 100.0)])
def test_a_percentile_is_a_value_that_was_measured(share: float, expected: float) -> None:
    """Of 0 … 100 in any order, the percentile is the value itself; between two values it is the larger one."""
    values = torch.tensor(random.Random(1).sample(range(101), 101))

    assert percentile(values, share) == expected
    assert percentile(torch.tensor([1.0, 2.0]), 0.95) == 2.0


def test_a_percentile_of_what_is_not_a_number_is_none() -> None:
    """One NaN is not hidden among good values."""
    assert math.isnan(percentile(torch.tensor([1.0, math.nan, 2.0]), 0.95))


@pytest.mark.parametrize(
    ("right", "asked", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605)],
)
def test_wilson_s_interval(right: int, asked: int, low: float, high: float) -> None:
    """The figures of Newcombe's paper of 1998, and the ends of the scale."""
    assert wilson_interval(right, asked) == pytest.approx((low, high), abs=1e-4)


def test_wilson_s_interval_holds_the_share_itself() -> None:
    """Rounding can't push an interval off what was measured."""
    for asked in (1, 3, 7, 192, 1000):
        for right in range(asked + 1):
            low, high = wilson_interval(right, asked)
            assert 0.0 <= low <= right / asked <= high <= 1.0


def test_the_bootstrap_interval_of_normal_figures() -> None:
    """For many figures it is the mean ± 1.96 standard errors, and it is the same every time."""
    generator = random.Random(3)
    figures = [generator.gauss(5.0, 2.0) for _ in range(400)]

    low, high = bootstrap_interval(figures)

    error = 1.96 * stdev(figures) / math.sqrt(400)
    assert (low, high) == pytest.approx((mean(figures) - error, mean(figures) + error), abs=error / 15)
    assert bootstrap_interval(figures) == (low, high)


def test_the_bootstrap_interval_covers_the_mean_of_skewed_figures() -> None:
    """Over 200 samples of 30 prompts whose KL is log-normal, about nine in ten intervals hold the true mean."""
    generator = random.Random(5)
    covered = 0
    for _ in range(200):
        low, high = bootstrap_interval([generator.lognormvariate(0.0, 0.6) for _ in range(30)])
        covered += low <= math.exp(0.18) <= high

    assert 170 <= covered <= 198


def test_the_bootstrap_interval_of_a_ratio_is_paired() -> None:
    """Prompts are drawn for both figures alike: a fixed part has no spread, however much the figures themselves scatter."""
    generator = random.Random(9)
    base = [generator.lognormvariate(0.0, 2.0) for _ in range(40)]
    noise = [generator.uniform(0.2, 0.4) for _ in base]

    fixed = bootstrap_interval([0.3 * value for value in base], over=base)
    low, high = bootstrap_interval([share * value for share, value in zip(noise, base, strict=True)], over=base)

    assert fixed == pytest.approx((0.3, 0.3))
    assert 0.2 < low < sum(map(math.prod, zip(noise, base, strict=True))) / sum(base) < high < 0.4


def test_no_interval_of_a_ratio_to_nothing() -> None:
    """Where some draw divides by 0 there is none."""
    assert bootstrap_interval([1.0, 2.0], over=[0.0, 1.0]) is None
    assert bootstrap_interval([0.0, 0.0], over=[0.0, 0.0]) is None


@pytest.mark.parametrize("figures", [[], [1.0], [1.0, math.nan], [1.0, math.inf]])
def test_no_interval_where_nothing_scatters(figures: list[float]) -> None:
    """Fewer than two prompts, or a figure that is not finite, give no interval instead of a wrong one."""
    assert bootstrap_interval(figures) is None
