from __future__ import annotations

import math

import pytest

from mamba_checkpoint_cache import DriftBudget


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        *(("relative_error", value) for value in (0.0, -0.1, math.nan)),
        *(("kl_nats", value) for value in (0.0, -0.1, math.nan)),
        *((name, value) for name in ("window", "checks", "recover_after") for value in (0, -1)),
    ],
)
def test_a_budget_that_means_nothing_is_refused(field, bad):
    """A ceiling must be over 0 and a count at least 1; the message names the field and the value."""
    with pytest.raises(ValueError, match=rf"DriftBudget\.{field} must be .*, got {bad}"):
        DriftBudget(**{field: bad})


@pytest.mark.parametrize(
    ("value", "within"), [(0.0, True), (0.2, True), (0.2000001, False), (math.inf, False), (math.nan, False)]
)
def test_a_ceiling_is_within_itself_and_nan_is_over_all(value, within):
    """Both ceilings are inclusive; what is not a number is never within one."""
    budget = DriftBudget(relative_error=0.2, kl_nats=0.2)

    assert budget.holds_error(value) is within
    assert budget.holds_kl(value) is within


def test_the_two_ceilings_are_apart():
    """The error is held against the error's ceiling, the KL against its own; the defaults are those that are published."""
    budget = DriftBudget()

    assert (budget.relative_error, budget.kl_nats) == (0.05, 0.1)
    assert (budget.window, budget.checks, budget.recover_after) == (32, 4, 256)
    assert not budget.holds_error(0.07)
    assert budget.holds_kl(0.07)
