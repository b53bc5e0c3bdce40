from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mamba_checkpoint_cache import LogitComparison, compare_logits
from mamba_checkpoint_cache.drift.logits import kl_nats

logits = st.lists(st.floats(-30, 30) | st.just(-math.inf), min_size=2, max_size=8).filter(lambda row: max(row) > -math.inf)


def plain_kl(reference: list[float], restored: list[float]) -> float:
    """The formula as textbooks have it, with Python's own floats."""
    total, other = sum(map(math.exp, reference)), sum(map(math.exp, restored))
    kl = 0.0
    for x, y in zip(reference, restored, strict=True):
        p, q = math.exp(x) / total, math.exp(y) / other
        if p > 0:
            kl += p * math.log(p / q) if q > 0 else math.inf
    return kl


@given(reference=logits, restored=logits)
def test_the_kl_is_that_of_the_formula(reference, restored):
    """Against a plain computation, with tokens that either run rules out; it is never negative."""
    size = min(len(reference), len(restored))
    reference, restored = [0.0, *reference[:size]], [0.0, *restored[:size]]

    found = float(kl_nats(torch.tensor(reference, dtype=torch.float64), torch.tensor(restored, dtype=torch.float64)))

    assert found >= 0
    assert found == pytest.approx(plain_kl(reference, restored), rel=1e-6, abs=1e-9)


@given(row=logits, dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_equal_logits_are_no_distance_apart(row, dtype):
    """Exactly 0 in every dtype, also where a token is ruled out."""
    tensor = torch.tensor([row], dtype=dtype)

    comparison = compare_logits(tensor, tensor.clone())

    assert comparison == LogitComparison((0.0,), (True,))
    assert math.copysign(1, comparison.mean_kl_nats) == 1


@given(row=st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=8), shift=st.floats(-1e-6, 1e-6))
def test_rounding_does_not_make_it_negative(row, shift):
    """Two runs that differ by next to nothing are next to nothing apart, and not less."""
    reference = torch.tensor([row])
    restored = reference.double() * (1 + shift)

    assert 0 <= compare_logits(reference, restored).mean_kl_nats < 1e-9


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_logits_that_are_not_finite_are_not_a_number(bad, which):
    """NaN or +Inf in either run makes the position and the mean NaN; the other positions keep theirs."""
    runs = [torch.zeros(2, 3), torch.zeros(2, 3)]
    runs[which][1, 2] = bad

    comparison = compare_logits(*runs)

    assert comparison.kl_nats[0] == 0
    assert math.isnan(comparison.kl_nats[1])
    assert math.isnan(comparison.mean_kl_nats)


def test_a_token_that_only_the_restored_run_rules_out_is_infinitely_far():
    """What the reference finds possible and the other impossible has no finite KL; the reverse has."""
    possible, impossible = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, -math.inf]])

    assert compare_logits(possible, impossible).mean_kl_nats == math.inf
    assert compare_logits(impossible, possible).mean_kl_nats == pytest.approx(math.log(2))


def test_positions_are_compared_one_by_one_and_from_the_reference():
    """Each position has its KL and its agreement; the mean is over positions; the direction is reference to restored."""
    reference = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    restored = torch.tensor([[0.0, 0.0, 2.0], [0.0, 3.0, 0.0]])

    comparison = compare_logits(reference, restored)

    expected = [plain_kl(*map(list, pair)) for pair in zip(reference.tolist(), restored.tolist(), strict=True)]
    assert comparison.kl_nats == pytest.approx(expected)
    assert comparison.agreed == (False, True)
    assert comparison.mean_kl_nats == pytest.approx(sum(expected) / 2)
    assert comparison.kl_nats[1] != pytest.approx(compare_logits(restored, reference).kl_nats[1])


@pytest.mark.parametrize(
    ("reference", "restored"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 3)),
        (torch.zeros(2, 3), torch.zeros(2, 4)),
        (torch.zeros(0, 3), torch.zeros(0, 3)),
        (torch.zeros(3), torch.zeros(3)),
    ],
)
def test_runs_that_can_not_be_compared_are_refused(reference, restored):
    """Other shapes, no position, no axis of positions: told with what was given."""
    with pytest.raises(ValueError, match=r"expected two tensors \[positions, vocabulary\] .* got \["):
        compare_logits(reference, restored)
