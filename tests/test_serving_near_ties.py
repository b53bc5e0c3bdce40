"""Choices that hang on rounding."""

from __future__ import annotations

import random

import pytest
import torch
from hash_model import assert_clean, greedy
from serving_side import real_model

from mamba_checkpoint_cache.serving import near_ties
from mamba_checkpoint_cache.serving.config import EngineConfig
from mamba_checkpoint_cache.serving.engine import Engine
from mamba_checkpoint_cache.serving.near_ties import NearTies
from mamba_checkpoint_cache.serving.sampling import Sampler
from mamba_checkpoint_cache.serving.tokens import ByteTokens


def engine(**options) -> Engine:
    sizes = {"codec": "none", "chunk": 16, "max_context": 150, "kv_slots": 600}
    return Engine(real_model(), ByteTokens(), EngineConfig(**(sizes | options)))


@pytest.mark.parametrize(("lead", "close"), [(0.0, True), (1e-6, True), (1e-2, False), (1.0, False)])
def test_a_lead_within_rounding_is_close(lead: float, close: bool) -> None:
    """Whether a choice is close depends on the lead of the first over the second, measured in the model's noise."""
    logits = torch.linspace(-2.0, 1.0, 257)
    logits[100] = logits.max() + lead

    assert NearTies(real_model(), 16).is_close(logits) is close


def test_a_close_choice_is_made_on_the_bits_of_a_run_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off the chunk grid the logits differ in their last bits; once every choice counts as close, not one bit does."""
    seen: dict[Engine, list[torch.Tensor]] = {}
    choose = Sampler.choose
    first = random.Random(1).choices(range(256), k=43)
    rest = random.Random(2).choices(range(256), k=50)

    def last_logits(subject: Engine) -> torch.Tensor:
        monkeypatch.setattr(
            Sampler, "choose", lambda self, logits: seen.setdefault(subject, []).append(logits) or choose(self, logits)
        )
        (request,) = subject.generate([first], greedy(6))
        (request,) = subject.generate([[*first, *request.output, *rest]], greedy(6))
        assert_clean(subject)
        assert request.cached_tokens == (48 if subject.config.caching else 0)
        return torch.stack(seen[subject][-6:])

    plain, cached = last_logits(engine(caching=False)), last_logits(engine())
    monkeypatch.setattr(near_ties, "MARGIN", 1e12)
    strict = engine()
    settled = last_logits(strict)

    assert not torch.equal(cached, plain)
    assert torch.allclose(cached, plain, atol=1e-3)
    assert torch.equal(settled, plain)
    assert strict.counts["near_ties"] == 6


def test_where_it_is_of_no_use_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """With int8, or in half precision, logits differ by more than a last bit; without a cache they don't differ."""
    assert engine()._near_ties is not None
    assert engine(codec="int8")._near_ties is None
    assert engine(caching=False)._near_ties is None
    monkeypatch.setattr("mamba_checkpoint_cache.serving.engine.MAX_NOISE", 0.0)
    assert engine()._near_ties is None
