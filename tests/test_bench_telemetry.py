"""The benchmark of telemetry: that it measures what it says."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hash_model import hash_engine

from mamba_checkpoint_cache import StateSpec, Telemetry
from mamba_checkpoint_cache.bench import telemetry as bench
from mamba_checkpoint_cache.tables import telemetry_table

SMALL = StateSpec(2, 2, 8, 8)


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "build_engine", lambda options, registry: hash_engine(telemetry=Telemetry(registry=registry)))
    monkeypatch.setattr(bench, "spec_from_config", lambda *arguments, **options: SMALL)
    monkeypatch.setattr(bench, "PROMPT_TOKENS", 16)


@pytest.mark.usefixtures("_tiny")
def test_it_gives_every_figure() -> None:
    """All the keys that are promised, as plain JSON, with figures that can be; the table shows them."""
    result = bench.run(rounds=4, commits=3, scrapes=3, ids=50)

    assert set(result) == {"operation_us", "commit_ratio", "scrape_ms", "scrape_bytes", "series_before", "series_after"}
    assert set(result["operation_us"]) == {"bare", "metrics", "unsampled", "recorded"}
    assert set(result["commit_ratio"]) == {"qwen3_next_shape", "demo_model"}
    assert all(figure > 0 for figure in [*result["operation_us"].values(), *result["commit_ratio"].values()])
    assert result["series_before"] == result["series_after"] > 300
    assert 10_000 < result["scrape_bytes"] <= 200_000
    assert json.dumps(result, allow_nan=False)
    assert f"{result['series_before']} before" in telemetry_table(result)


def test_the_arms_are_what_they_are_called() -> None:
    """Bare has no telemetry, metrics no span, unsampled spans that nobody keeps, recorded ones that somebody would."""
    found: dict[str, Any] = {}
    for arm in ("bare", "metrics", "unsampled", "recorded"):
        telemetry = bench._telemetry(arm)
        if telemetry is None:
            found[arm] = None
            continue
        with telemetry.operation("match") as operation:
            found[arm] = (operation.span.get_span_context().is_valid, operation.span.is_recording())

    assert found == {"bare": None, "metrics": (False, False), "unsampled": (True, False), "recorded": (True, True)}


@pytest.mark.parametrize("arm", ["bare", "unsampled"])
def test_every_timed_commit_evicts_and_stores(arm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No prompt comes twice, and the pool is full: what is timed is the whole way of a commit under its lease, state and all."""
    requests = bench._Requests(arm, SMALL, "int8")
    commit = requests.cache.commit
    monkeypatch.setattr(requests.cache, "commit", lambda *a, lease, **o: (lease.depth, commit(*a, lease=lease, **o))[1])
    for _ in range(bench.SLOTS + 5):
        requests.serve()
        assert requests.cache.checkpoints.slots.counts.reserved == 0
    assert requests.cache.checkpoints.slots.counts.free == 0
    assert torch.isfinite(requests.cache.active.state).all()
    if requests.telemetry is not None:
        value = requests.telemetry.registry.get_sample_value
        assert value("mamba_checkpoint_commits_total", {"cache": "default", "outcome": "stored"}) == bench.SLOTS + 5
        evicted = {"cache": "default", "pool": "checkpoint", "reason": "forced", "reused": "no"}
        assert value("mamba_checkpoint_evictions_total", evicted) == 5


def test_arms_take_turns_and_the_first_round_warms_up() -> None:
    """Who goes first changes from round to round; it is left out; the ratio is the median of theirs."""
    order: list[str] = []
    figures = {"a": iter([9.0, 1.0, 2.0, 3.0]), "b": iter([9.0, 4.0, 6.0, 5.0])}

    def arm(name: str) -> Any:
        return lambda: (order.append(name), next(figures[name]))[1]

    seconds = bench._take_turns({name: arm(name) for name in figures}, 3, lambda count: None)

    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert seconds == {"a": [1.0, 2.0, 3.0], "b": [4.0, 6.0, 5.0]}
    assert bench._ratio({"unsampled": seconds["b"], "bare": seconds["a"]}) == 3.0
