"""The benchmark of sampled checks on a tiny model: that it measures what it says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from serving_side import real_model

from mamba_checkpoint_cache.bench import sampling
from mamba_checkpoint_cache.serving import drift_checks
from mamba_checkpoint_cache.serving.models import LoadedModel
from mamba_checkpoint_cache.serving.tokens import ByteTokens
from mamba_checkpoint_cache.tables import sampling_table


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "load_model", lambda path: LoadedModel("tiny", real_model().model, ByteTokens(), 512))
    monkeypatch.setattr(sampling, "prepare_model", lambda model: real_model())
    monkeypatch.setattr(sampling, "PREFIX_TOKENS", 64)


def test_every_request_is_a_hit_and_both_engines_run_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first round all prefixes are reused, by both engines alike, one of which checks as often as it is told to."""
    monkeypatch.setattr(drift_checks, "BUSY_SHARE", 1.0)
    served: dict[Any, list[Any]] = {}
    generate = sampling.Engine.generate

    def noted(engine: Any, prompts: Any, how: Any) -> Any:
        requests = generate(engine, prompts, how)
        served.setdefault(engine.config.drift_rate, []).append([(r.tokens, r.cached_tokens, r.output) for r in requests])
        return requests

    monkeypatch.setattr(sampling.Engine, "generate", noted)
    monkeypatch.setattr(sampling, "PREFIXES", 1)

    result = sampling.run(rounds=3, requests=2, rates={"off": 0.0, "sampled": 1.0})

    assert served[0.0] == served[1.0]
    assert all(cached >= 64 for requests in served[1.0][1:] for _, cached, _ in requests)
    assert (result["rounds"], result["requests"], result["model"], result["codec"]) == (3, 6, "tiny", "int8-pivot")
    assert result["checks"]["ok"] >= 1
    assert result["checks"]["failed"] == 0
    assert sum(result["checks"].values()) <= 8
    assert result["positions"] == 16 * result["checks"]["ok"]
    assert 0 < result["kl_mean"] < 1e-2
    assert result["ratio_ci"][0] <= result["ratio"] <= result["ratio_ci"][1]
    assert json.dumps(result, allow_nan=False)
    assert f"{result['checks']['ok']} ok" in sampling_table(result)


def test_without_a_check_there_is_no_kl() -> None:
    """A run too short for a check says so, in the table too."""
    result = sampling.run(rounds=1, requests=1, rates={"off": 0.0, "sampled": 0.0})

    assert (result["positions"], result["kl_mean"], result["ratio_ci"]) == (0, None, None)
    assert "- nats, the mean of 0 positions" in sampling_table(result)


def test_the_ratio_is_throughput_with_over_throughput_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that takes twice the time with sampling has half the throughput; the round that fills the cache is left out."""
    rounds = iter([100.0, 100.0, *[2.0, 1.0, 1.0, 2.0] * 2])  # the engines take turns in going first
    monkeypatch.setattr(sampling, "_serve", lambda engine, prompts: next(rounds))

    result = sampling.run(rounds=4, requests=10)

    assert (result["ratio"], result["ratio_ci"]) == (0.5, (0.5, 0.5))
