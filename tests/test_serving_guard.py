"""The drift guard end to end: a codec that turns bad under the reference engine, and good again."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hash_model import assert_clean, greedy
from serving_side import real_model
from torch import Tensor

from mamba_checkpoint_cache import Telemetry
from mamba_checkpoint_cache.codec.layered import LayeredCodec
from mamba_checkpoint_cache.codec.reference import Int8Codec, measure
from mamba_checkpoint_cache.drift.budget import DriftBudget
from mamba_checkpoint_cache.drift.guard import DriftGuard
from mamba_checkpoint_cache.serving.config import EngineConfig
from mamba_checkpoint_cache.serving.engine import Engine
from mamba_checkpoint_cache.serving.tokens import ByteTokens

WINDOW, CHECKS, RECOVER_AFTER = 8, 4, 48
KL_CEILING = 3e-4
"""Nats between what int8 costs this model and what three bits cost it."""


class FailingCodec(Int8Codec):
    """int8, until ``worn`` cuts its levels to three bits."""

    name = "failing"

    def __init__(self) -> None:
        self.worn = False

    def _encode(self, state: Tensor, row: dict[str, Tensor]) -> Tensor:
        report = super()._encode(state, row)
        if self.worn:
            row["q"].copy_((row["q"].float() / 36.0).round().clamp(-3, 3) * 36.0)
            report = measure(state, self._decode(row, state))
        return report


class Deployment:
    """A reference engine with a guard that checks every hit, and a codec that can be made bad, in its last layer or in all."""

    def __init__(self, action: str, relative_error: float, *, layers: int = 1, last_only: bool = False) -> None:
        budget = DriftBudget(relative_error, KL_CEILING, window=WINDOW, checks=CHECKS, recover_after=RECOVER_AFTER)
        self.guard = DriftGuard(budget, action)
        self.codec = FailingCodec()
        self.telemetry = Telemetry()
        config = EngineConfig(
            codec=LayeredCodec([*[Int8Codec()] * (layers - 1), self.codec]) if last_only else self.codec,
            chunk=16,
            max_context=300,
            kv_slots=1200,
            drift_rate=1.0,
            drift_checks_per_minute=10**6,
        )
        self.engine = Engine(real_model(layers), ByteTokens(), config, self.telemetry, guard=self.guard)
        self.plain = Engine(
            real_model(layers), ByteTokens(), EngineConfig(chunk=16, max_context=300, kv_slots=1200, caching=False)
        )
        self.results: list = []
        record = self.engine.cache.record_check
        self.engine.cache.record_check = lambda result: self.results.append(result) or record(result)
        self._prompts = prompts()

    def serve(self, requests: int) -> None:
        """So many requests, each finished and checked before the next; all must come to their end, the cache sound."""
        for _ in range(requests):
            prompt = next(self._prompts)
            (request,) = self.engine.generate([prompt], greedy(6))
            while not self.engine.idle:
                self.engine.step()
            self.engine.cache.check()
            assert request.finish.reason == "length", request.finish.message
            self.last = request

    def serve_until(self, mode: str, at_most: int) -> int:
        """Serve until the guard's mode is ``mode``; the number of requests that it took."""
        for count in range(1, at_most + 1):
            self.serve(1)
            if self.guard.mode == mode:
                return count
        raise AssertionError(f"still {self.guard.mode} after {at_most} requests")

    def drifts(self) -> list[float]:
        """The mean KL of each check since the last call."""
        found = [result.mean_kl_nats for result in self.results if not isinstance(result, str)]
        self.results.clear()
        return found

    def count(self, name: str, **labels: str) -> float:
        return self.telemetry.registry.get_sample_value(f"mamba_checkpoint_{name}", {"cache": "default", **labels})


def prompts() -> Iterator[list[int]]:
    """Questions about four texts, in turn, without end."""
    draw = random.Random(0)
    texts = [draw.choices(range(256), k=64) for _ in range(4)]
    while True:
        for text in texts:
            yield [*text, *draw.choices(range(256), k=10)]


@pytest.mark.parametrize(("action", "mode"), [("native", "native"), ("stop", "stopped")])
@pytest.mark.parametrize(("relative_error", "cause"), [(0.05, "its error"), (1.0, "its logits")])
def test_a_codec_that_turns_bad_is_taken_out_and_put_back(action: str, mode: str, relative_error: float, cause: str) -> None:
    """The guard degrades within its window, the KL comes back under its ceiling, and int8 returns once it is good again.

    Whether the compressions tell of it or only the logits; no request fails on the way.
    """
    site = Deployment(action, relative_error)
    site.serve(12)
    assert site.guard.mode == "normal"
    assert 0 < max(site.drifts()) < KL_CEILING

    site.codec.worn = True
    site.engine.flush()
    compressed = site.count("compressions_total", outcome="stored")
    site.serve_until(mode, at_most=3 * CHECKS)
    if cause == "its error":
        assert site.count("compressions_total", outcome="stored") - compressed <= WINDOW
    else:
        assert max(site.drifts()) > KL_CEILING
    site.drifts()

    site.serve(8)
    assert site.guard.mode == mode
    drifts = site.drifts()
    assert max(drifts, default=0.0) == 0.0
    assert (len(drifts) > 0) == (mode == "native")
    assert (site.last.cached_tokens > 0) == (mode == "native")
    assert site.last.output == site.plain.generate([site.last.tokens], greedy(6))[0].output

    site.codec.worn = False
    site.serve_until("normal", at_most=RECOVER_AFTER)
    site.drifts()
    site.serve(12)
    assert site.guard.mode == "normal"
    assert site.last.cached_tokens >= 64
    assert 0 < max(site.drifts()) < KL_CEILING
    assert (site.count("guard_changes_total", to=mode), site.count("guard_changes_total", to="normal")) == (1, 1)
    assert site.count("drift_checks_total", outcome="failed") == 0
    assert site.count("guard_mode", mode="normal") == 1
    assert_clean(site.engine)


def test_a_codec_that_turns_bad_in_one_layer_keeps_the_others() -> None:
    """The guard moves that layer only; reuse goes on with a drift under the ceiling, and the codec comes back in all layers."""
    site = Deployment("native", 0.05, layers=3, last_only=True)
    site.serve(12)
    pool, slots = site.engine.cache.checkpoints, site.count("slot_capacity", pool="checkpoint")
    assert site.guard.mode == "normal"

    site.codec.worn = True
    site.serve_until("native", at_most=3 * CHECKS)
    site.drifts()
    site.serve(12)

    assert (site.guard.native, pool.codec.name) == ({2}, "int8,2=none")
    assert 0.5 * slots < site.count("slot_capacity", pool="checkpoint") < slots
    assert [site.count("layers", codec=codec) for codec in ("int8", "none")] == [2, 1]
    assert 0 < max(site.drifts()) < KL_CEILING
    assert site.last.cached_tokens >= 64

    site.codec.worn = False
    site.serve_until("normal", at_most=RECOVER_AFTER)
    site.serve(4)
    assert (pool.codec.name, site.count("slot_capacity", pool="checkpoint")) == ("int8,2=failing", slots)
    assert site.count("drift_checks_total", outcome="failed") == 0
    assert_clean(site.engine)


def test_a_codec_that_stays_bad_stays_out() -> None:
    """While trials still show the error, the wait for a recovery does not end."""
    site = Deployment("native", 0.05)
    site.codec.worn = True
    site.serve_until("native", at_most=12)

    site.serve(RECOVER_AFTER)

    assert site.guard.mode == "native"
    assert site.count("commits_total", outcome="stored") > RECOVER_AFTER
    assert site.count("guard_changes_total", to="normal") == 0


def test_a_lossless_codec_is_never_taken_out() -> None:
    """With exact checkpoints there is no drift, and a guard has nothing to do."""
    guard = DriftGuard(DriftBudget(1e-9, 1e-9, window=4, checks=2))
    config = EngineConfig(codec="none", chunk=16, max_context=300, kv_slots=1200, drift_rate=1.0, drift_checks_per_minute=10**6)
    engine = Engine(real_model(), ByteTokens(), config, guard=guard)
    source = prompts()

    for _ in range(20):
        engine.generate([next(source)], greedy(6))
        while not engine.idle:
            engine.step()

    assert guard.mode == "normal"
    assert_clean(engine)


def test_capped_hops_bound_the_drift_of_a_long_conversation() -> None:
    """With ``max_hops`` no turn goes on from a state with more round trips, and the answers' checks go on."""
    config = EngineConfig(chunk=16, max_context=1000, kv_slots=4000, max_hops=3, drift_rate=1.0, drift_checks_per_minute=10**6)
    engine = Engine(real_model(), ByteTokens(), config)
    hops, match = [], engine.cache.match_prefix
    engine.cache.match_prefix = lambda tokens: hops.append((lease := match(tokens)).hops) or lease
    said: list[int] = []
    for turn in range(20):
        said += random.Random(turn).choices(range(256), k=9)
        (request,) = engine.generate([said], greedy(4))
        said += request.output
        while not engine.idle:
            engine.step()

    assert max(hops) == 2
    assert hops.count(0) < 10
    assert_clean(engine)
    assert torch.isfinite(engine.cache.active.state).all()
