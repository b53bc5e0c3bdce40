"""The verdict against a budget."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mamba_checkpoint_cache.drift.budget import DriftBudget
from mamba_checkpoint_cache.evaluation.verdict import Control, verdict

BUDGET = DriftBudget(kl_nats=0.1, relative_error=0.05)
EXACT = Control(exact=True, largest_kl=0.0)


def row(**changed: Any) -> dict[str, Any]:
    sound = {
        "codec": "int8",
        "task": "text",
        "distance": 1,
        "hops": 1,
        "kl_mean": 0.01,
        "kl_ci": (0.005, 0.02),
        "worst_layer": 0.01,
    }
    return sound | changed


def test_within_the_budget() -> None:
    """What lies under both ceilings, or on them, is within; the text has the worst figures and where they were measured."""
    rows = [row(), row(hops=4, kl_mean=0.1), row(distance=64, kl_mean=0.02, worst_layer=0.05)]

    found = verdict(rows, BUDGET, EXACT)

    assert found["within"]
    assert found["over"] == []
    assert found["budget"] == {"kl_nats": 0.1, "relative_error": 0.05}
    assert found["control"] == {"exact": True, "largest_kl": 0.0, "sound": True}
    assert "int8 is within the budget: its mean KL is up to 0.1 nats (text, 1 token after 4 restores)" in found["text"]
    assert "relative error of its worst layer is 0.05" in found["text"]


@pytest.mark.parametrize("kl", [0.1001, math.nan, math.inf])
def test_a_mean_kl_over_the_ceiling(kl: float) -> None:
    """Any row counts, and what is not finite is over; the text names the row."""
    found = verdict([row(), row(task="recall", distance=16, hops=2, kl_mean=kl)], BUDGET, EXACT)

    assert not found["within"]
    (over,) = found["over"]
    assert {key: over[key] for key in ("codec", "task", "distance", "hops", "figure", "ceiling")} == {
        "codec": "int8",
        "task": "recall",
        "distance": 16,
        "hops": 2,
        "figure": "kl_mean",
        "ceiling": 0.1,
    }
    assert over["value"] is kl
    assert "int8 is OVER the budget" in found["text"]
    assert "(recall, 16 tokens after 2 restores)" in found["text"]


def test_the_relative_error_of_one_compression_counts() -> None:
    """The budget is on a compression: errors that add up over hops are not held against it."""
    rows = [row(worst_layer=0.06), row(distance=16, worst_layer=0.06), row(hops=4, worst_layer=0.2)]

    found = verdict(rows, BUDGET, EXACT)

    assert [(over["figure"], over["value"]) for over in found["over"]] == [("worst_layer", 0.06)]
    assert "int8 is OVER the budget" in found["text"]


def test_a_control_that_is_not_zero_condemns_the_rest() -> None:
    """A KL without a codec is a fault of state: over, whatever the budget, unless the model itself is not exact."""
    rows = [row(codec="none", kl_mean=1e-6), row()]

    assert not verdict(rows, BUDGET, Control(exact=True, largest_kl=1e-6))["within"]
    assert "must be exactly 0" in verdict(rows, BUDGET, Control(exact=True, largest_kl=1e-6))["text"]
    assert not verdict(rows, BUDGET, Control(exact=True, largest_kl=math.nan))["within"]
    assert verdict(rows, BUDGET, Control(exact=False, largest_kl=1e-6))["within"]
    assert verdict(rows, BUDGET, None)["within"]


def test_each_codec_has_its_sentence() -> None:
    """One codec over and one within are told apart."""
    found = verdict([row(codec="none", kl_mean=5.0), row(), row(codec="int4", kl_mean=0.5)], BUDGET, EXACT)

    assert "int8 is within" in found["text"]
    assert "int4 is OVER" in found["text"]
    assert {over["codec"] for over in found["over"]} == {"int4"}


def test_an_interval_over_the_ceiling_is_too_close_to_call() -> None:
    """A mean within whose interval is not asks for more prompts."""
    assert "too close to call" in verdict([row(kl_ci=(0.0, 0.2))], BUDGET, EXACT)["text"]
    assert "too close to call" not in verdict([row(kl_ci=None)], BUDGET, EXACT)["text"]


def test_nothing_lossy_is_nothing_to_judge() -> None:
    """The control alone is within the budget."""
    found = verdict([row(codec="none", kl_mean=0.0)], BUDGET, EXACT)

    assert (found["within"], found["text"]) == (True, "No lossy codec was measured.")
