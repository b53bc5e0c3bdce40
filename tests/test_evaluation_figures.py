"""Figures from trials that were written by hand, against plain loops."""

from __future__ import annotations

import math
import random
from statistics import mean

import pytest
import torch

from mamba_checkpoint_cache.evaluation import figures, tasks
from mamba_checkpoint_cache.evaluation.arms import RECHUNKED, ArmKey
from mamba_checkpoint_cache.evaluation.lockstep import STEP, Trace, Trial
from mamba_checkpoint_cache.evaluation.prompts import Prompt
from mamba_checkpoint_cache.evaluation.statistics import bootstrap_interval, wilson_interval
from mamba_checkpoint_cache.serving.tokens import ByteTokens

DEPTH = 5


def trace(kl: list[float], *, agreed: list[bool] | None = None, loss=None, right=None, errors=((1.0,),)) -> Trace:
    """``errors``: for each restore, the error energy by head of the one layer; each head has an energy of 4."""
    count = len(kl)
    return Trace(
        torch.tensor(kl, dtype=torch.float64),
        torch.tensor(agreed if agreed is not None else [True] * count),
        torch.tensor(loss if loss is not None else [0.0] * (count - 1), dtype=torch.float64),
        torch.tensor(right if right is not None else [True] * (count - 1)),
        torch.tensor([[[[4.0, error] for error in heads]] for heads in errors], dtype=torch.float64),
    )


def trial(once: Trace, again: Trace | None = None, *, margins=None, reference: Trace | None = None, prompt=None) -> Trial:
    count = len(once.kl_nats)
    margins = torch.tensor(margins if margins is not None else [0.5] * count, dtype=torch.float64)
    prompt = prompt or Prompt("text", list(range(DEPTH + count)), DEPTH)
    arms = {ArmKey("int8"): once, ArmKey("int8", again=True): again or once, RECHUNKED: once}
    return Trial(prompt, margins, reference or once, arms)


@pytest.mark.parametrize(
    ("hops", "distance", "first", "last"),
    [(1, 1, 0, 0), (1, 16, 0, 15), (1, 64, 48, 63), (1, 256, 240, 255), (2, 1, 16, 16), (2, 16, 16, 31), (16, 16, 240, 255)],
)
def test_a_row_is_the_window_that_ends_at_its_distance(hops: int, distance: int, first: int, last: int) -> None:
    """Positions are counted from the last restore, and the window never reaches back over it."""
    generator = random.Random(hops * distance)
    curves = [[generator.random() for _ in range(256)] for _ in range(5)]
    agreed = [[generator.random() < 0.7 for _ in range(256)] for _ in range(5)]
    other = trace([9.0] * 256, agreed=[False] * 256)
    found = [trace(kl, agreed=flags, errors=[[1.0]] * 16) for kl, flags in zip(curves, agreed, strict=True)]
    trials = [trial(one, other) if hops == 1 else trial(other, one) for one in found]

    row = figures.drift(trials, "int8", hops, distance)

    inside = [curve[first : last + 1] for curve in curves]
    pooled = sorted(value for window in inside for value in window)
    assert row["kl_mean"] == pytest.approx(mean(pooled))
    assert row["kl_p95"] == pooled[math.ceil(0.95 * (len(pooled) - 1))]
    assert row["kl_p99"] == pooled[math.ceil(0.99 * (len(pooled) - 1))]
    assert row["kl_ci"] == pytest.approx(bootstrap_interval([mean(window) for window in inside]))
    assert row["top1"] == pytest.approx(mean(flag for flags in agreed for flag in flags[first : last + 1]))
    assert row["prompts"] == 5


def test_prompts_that_end_earlier_are_left_out() -> None:
    """A distance that some prompts don't reach counts the others; one that none reaches has no row."""
    trials = [trial(trace([0.1] * 16)), trial(trace([0.3] * 64))]

    assert figures.drift(trials, "int8", 1, 16)["prompts"] == 2
    assert (figures.drift(trials, "int8", 1, 64)["kl_mean"], figures.drift(trials, "int8", 1, 64)["prompts"]) == (0.3, 1)
    assert figures.drift(trials, "int8", 1, 256) is None


def test_every_hop_and_distance_has_its_row() -> None:
    """All distances after one restore; after more, those that fit before the next."""
    points = figures.points()

    assert len(set(points)) == len(points)
    assert {distance for hops, distance in points if hops == 1} == {1, 16, 64, 256}
    assert {hops for hops, distance in points if distance == 16} == {1, 2, 4, 8, 16}
    assert all(hops == 1 or distance <= STEP for hops, distance in points)
    assert all((hops - 1) * STEP + distance <= figures.DISTANCES[-1] for hops, distance in points)


def test_a_row_has_the_state_error_of_its_own_restore() -> None:
    """The error of hop h is that of the h-th restore, over all prompts; the worst head is the largest of any."""
    trials = [
        trial(trace([0.0] * 32), trace([0.0] * 32, errors=[[1.0, 1.0], [first, second]])) for first, second in [(4, 1), (2, 3)]
    ]

    row = figures.drift(trials, "int8", 2, 16)

    assert row["relative_error"] == pytest.approx(math.sqrt((4 + 1 + 2 + 3) / 16))
    assert row["worst_head"] == pytest.approx(math.sqrt((4 + 2) / 8))
    assert row["worst_layer"] == pytest.approx(row["relative_error"]), "there is one layer"
    assert figures.head_errors([t.arms[ArmKey("int8", True)].energies[1] for t in trials]).flatten().tolist() == pytest.approx(
        [math.sqrt(6 / 8), math.sqrt(4 / 8)]
    )


def test_the_worst_layer_is_that_with_the_largest_error_of_its_own() -> None:
    """Over all prompts and heads of a layer, relative to that layer's state."""
    energies = [torch.tensor([[[4.0, 1.0], [4.0, 0.0]], [[100.0, 2.0], [0.0, first]]]) for first in (0.0, 1.0)]

    assert figures.layer_errors(energies).tolist() == pytest.approx([math.sqrt(2 / 16), math.sqrt(5 / 200)])


def test_a_state_of_zeros_has_no_error() -> None:
    """0/0 is 0 where nothing was lost, and stays NaN where a state was not finite."""
    assert figures.relative_error([torch.zeros(2, 3, 2)]) == 0.0
    assert not figures.head_errors([torch.zeros(2, 3, 2)]).any()
    assert math.isnan(figures.relative_error([torch.full((2, 3, 2), math.nan)]))


def test_what_is_not_finite_is_not_averaged_away() -> None:
    """One NaN makes the row's mean and percentiles NaN, and leaves it without an interval."""
    trials = [trial(trace([0.1] * 16)), trial(trace([0.1] * 15 + [math.nan]))]

    row = figures.drift(trials, "int8", 1, 16)

    assert math.isnan(row["kl_mean"])
    assert math.isnan(row["kl_p99"])
    assert row["kl_ci"] is None
    assert math.isnan(figures.largest_kl(trials, "int8"))


def test_agreement_by_margin_counts_each_position_once() -> None:
    """Classes take their lower bound, the last one also its upper; the last row is all of them."""
    margins = [0.0, 0.049, 0.05, 0.3, 0.5, 1.0]
    agreed = [False, True, False, True, True, True]

    rows = figures.agreement([trial(trace([0.0] * 6, agreed=agreed), margins=margins)], "int8")

    assert [(row["from"], row["to"], row["positions"], row["top1"]) for row in rows] == [
        (0.0, 0.05, 2, 0.5),
        (0.05, 0.2, 1, 0.0),
        (0.2, 0.5, 1, 1.0),
        (0.5, 1.0, 2, 1.0),
        (0.0, 1.0, 6, pytest.approx(4 / 6)),
    ]
    assert figures.agreement([trial(trace([0.0]), margins=[0.6])], "int8")[0]["top1"] is None


def test_the_mean_over_everything_and_the_largest() -> None:
    """Noise floors are means over all positions; the control is the largest KL of either arm."""
    trials = [trial(trace([0.0, 0.2]), trace([0.0, 0.7])), trial(trace([0.3]))]

    assert figures.mean_kl(trials, RECHUNKED) == pytest.approx((0.2 + 0.3) / 3)
    assert figures.largest_kl(trials, "int8") == 0.7


def test_recall_counts_answers_only() -> None:
    """A key's position is asked, a value's is not; cached and uncached answer the same questions."""
    prompt = Prompt("recall", list(range(DEPTH + 6)), DEPTH, [DEPTH + 1, DEPTH + 3, DEPTH + 5])
    cached = trace([0.0] * 6, right=[True, False, False, False, True])
    uncached = trace([0.0] * 6, right=[True, True, True, False, True])

    found = tasks.recall([trial(cached, reference=uncached, prompt=prompt)] * 2, "int8")

    assert (found["cached"], found["uncached"], found["asked"]) == (pytest.approx(4 / 6), 1.0, 6)
    assert found["ci"] == wilson_interval(4, 6)
    assert found["difference_ci"] == pytest.approx((-1 / 3, -1 / 3))


def test_bits_per_byte_are_over_what_was_predicted() -> None:
    """Nats of the predicted tokens become bits, over the bytes of these tokens; one that ends a text is no byte."""
    prompt = Prompt("text", [*b"abcde", *b"xy", 256, *b"z"], DEPTH)
    cached, uncached = trace([0.0] * 4, loss=[1.0, 2.0, 4.0]), trace([0.0] * 4, loss=[1.0, 2.0, 3.0])

    found = tasks.bits_per_byte([trial(cached, reference=uncached, prompt=prompt)] * 3, "int8", ByteTokens())

    assert found["cached"] == pytest.approx(7 / math.log(2) / 2)
    assert found["uncached"] == pytest.approx(6 / math.log(2) / 2)
    assert found["difference_ci"] == pytest.approx([1 / math.log(2) / 2] * 2)
    assert (found["bytes"], found["prompts"]) == (6, 3)


class Pieces:
    """A tokenizer of pieces; odd tokens are halves of a character."""

    vocab_size, eos_ids = 100, frozenset()

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: list[int]) -> str:
        return "".join("\ufffd" if i % 2 else "añ" for i in ids)


def test_bytes_of_a_foreign_tokenizer_are_those_of_its_text() -> None:
    """Prompts that don't decode to whole characters are left out; without any other there is no figure."""
    whole, broken = Prompt("text", [0] * DEPTH + [2, 4, 6], DEPTH), Prompt("text", [0] * DEPTH + [2, 3, 6], DEPTH)
    lossy = trace([0.0] * 3, loss=[1.0, 1.0])

    found = tasks.bits_per_byte([trial(lossy, prompt=whole), trial(lossy, prompt=broken)], "int8", Pieces())

    assert (found["cached"], found["bytes"], found["prompts"]) == (pytest.approx(2 / math.log(2) / 6), 6, 1)
    assert tasks.bits_per_byte([trial(lossy, prompt=broken)], "int8", Pieces()) is None
    assert tasks.bits_per_byte([trial(trace([0.0]), prompt=Prompt("text", [0] * 6, 5))], "int8", ByteTokens()) is None
