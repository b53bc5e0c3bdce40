"""Two instruments, one figure: what the server samples while it serves is what the drift report measures beforehand."""

from __future__ import annotations

import pytest
import torch

from mamba_checkpoint_cache.drift.logits import LogitComparison
from mamba_checkpoint_cache.drift.monitor import MAX_POSITIONS
from mamba_checkpoint_cache.evaluation.arms import ArmKey
from mamba_checkpoint_cache.evaluation.measure import measure
from mamba_checkpoint_cache.evaluation.prompts import Prompt
from mamba_checkpoint_cache.integrations.probe import prepare_model
from mamba_checkpoint_cache.serving.config import EngineConfig
from mamba_checkpoint_cache.serving.engine import Engine
from mamba_checkpoint_cache.serving.models import load_model
from mamba_checkpoint_cache.serving.sampling import Sampling
from mamba_checkpoint_cache.small_models import SMALL_MODELS
from mamba_checkpoint_cache.small_models.text import held_out_text

DEPTH = 256
NUM_PROMPTS = 6


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL_MODELS)
def test_the_sampled_kl_is_that_of_the_report(name: str) -> None:
    """On the same tokens after the same restore both find the same KL, position by position, as far as float32 allows."""
    torch.set_num_threads(1)
    loaded = load_model(name)
    model = prepare_model(loaded.model)
    options = {"chunk": 64, "max_context": 512, "kv_slots": 4096, "drift_rate": 1.0, "drift_checks_per_minute": 10**6}
    engine = Engine(model, loaded.tokens, EngineConfig(codec="int8", **options))
    checks: list[LogitComparison] = []
    engine.cache.record_check = checks.append
    sampling, prompts = Sampling(max_new_tokens=MAX_POSITIONS - 1, ignore_eos=True), []
    for seed in range(NUM_PROMPTS):
        text = list(held_out_text(DEPTH + 1, seed=seed))
        engine.flush()
        engine.generate([text[:DEPTH]], Sampling(max_new_tokens=0))
        (request,) = engine.generate([text], sampling)
        assert request.cached_tokens == DEPTH
        while not engine.idle:
            engine.step()
        prompts.append(Prompt("prompts", [*text, *request.output], DEPTH))

    trials = measure(model, prompts, ["int8"], lambda _count: None).trials["prompts"]

    assert len(checks) == NUM_PROMPTS
    for check, trial in zip(checks, trials, strict=True):
        reported = trial.arms[ArmKey("int8")].kl_nats[: len(check.kl_nats)]
        assert sum(check.kl_nats) > 0
        assert torch.tensor(check.kl_nats, dtype=torch.float64).allclose(reported, rtol=0.05, atol=1e-9)
