"""Choosing tokens."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from mamba_checkpoint_cache.serving.sampling import NonFiniteLogitsError, Sampler, Sampling


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens must be 0 or more, got -1"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    """Each parameter is checked at construction, with the value in the message."""
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


@pytest.mark.parametrize("temperature", [0.0, 1e-7, 5e-324])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_first_of_the_likeliest(temperature: float, dtype: torch.dtype) -> None:
    """At temperature 0, and at one too small to divide by, the likeliest token is taken; of equals the smallest id."""
    logits = torch.tensor([0.0, 3.0, 1.0, 3.0], dtype=dtype)

    sampler = Sampler(Sampling(temperature=temperature))

    assert (sampler.greedy, sampler.choose(logits)) == (True, 1)


def test_a_seed_makes_the_draws_repeatable() -> None:
    """Two samplers of one seed draw alike; another seed draws otherwise; without one, so does every sampler."""
    logits = torch.randn(50)

    def draws(seed: int | None) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.0, seed=seed))
        return [sampler.choose(logits) for _ in range(40)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)
    assert draws(None) != draws(None)


def test_draws_follow_the_distribution() -> None:
    """The share of each token is its probability at that temperature."""
    logits = torch.tensor([0.0, 1.0, 2.0]) * 2
    sampler = Sampler(Sampling(temperature=2.0, seed=3))

    counts = Counter(sampler.choose(logits) for _ in range(3000))

    shares = torch.tensor([counts[i] / 3000 for i in range(3)])
    assert torch.allclose(shares, torch.softmax(torch.tensor([0.0, 1.0, 2.0]), 0), atol=0.03)


def test_top_p_cuts_the_tail() -> None:
    """Only the fewest likeliest tokens that make up top_p are ever drawn; the likeliest always may be."""
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()

    def drawn(top_p: float) -> set[int]:
        sampler = Sampler(Sampling(temperature=1.0, top_p=top_p, seed=0))
        return {sampler.choose(logits) for _ in range(300)}

    assert (drawn(0.01), drawn(0.6), drawn(0.75), drawn(1.0)) == ({3}, {2, 3}, {1, 2, 3}, {0, 1, 2, 3})


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_raise(bad: float, temperature: float) -> None:
    """There is no next token in NaN or infinity."""
    with pytest.raises(NonFiniteLogitsError):
        Sampler(Sampling(temperature=temperature)).choose(torch.tensor([0.0, bad]))
