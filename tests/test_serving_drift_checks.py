"""The sampled logit check in the reference engine."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace

import pytest
from hash_model import HashModel, assert_clean, expected, greedy, hash_engine
from serving_side import real_model
from structlog.testing import capture_logs
from telemetry_fakes import Clock
from tiny_models import VOCAB, probed

from mamba_checkpoint_cache import Telemetry
from mamba_checkpoint_cache.codec.reference import Int8Codec
from mamba_checkpoint_cache.drift.logits import LogitComparison
from mamba_checkpoint_cache.drift.monitor import MAX_POSITIONS
from mamba_checkpoint_cache.integrations.continuation import Mode
from mamba_checkpoint_cache.serving.config import EngineConfig
from mamba_checkpoint_cache.serving.drift_checks import BUSY_SHARE
from mamba_checkpoint_cache.serving.engine import Engine
from mamba_checkpoint_cache.serving.engine_thread import EngineThread
from mamba_checkpoint_cache.serving.logprobs import WantedLogprobs
from mamba_checkpoint_cache.serving.request import Request
from mamba_checkpoint_cache.serving.tokens import ByteTokens

ALWAYS = {"drift_rate": 1.0, "drift_checks_per_minute": 10**6}
ROUNDING = 1e-12
"""Nats that no compression stays under, and no rounding of float32 exceeds."""


def prompt_of(length: int, seed: int = 0, vocabulary: int = VOCAB) -> list[int]:
    return random.Random(seed).choices(range(vocabulary), k=length)


def results_of(engine: Engine) -> list:
    """How checks end from now on, in order."""
    results, record = [], engine.cache.record_check
    engine.cache.record_check = lambda result: results.append(result) or record(result)
    return results


def real_engine(model=None, codec: str = "none", **options) -> Engine:
    sizes = {"codec": codec, "chunk": 16, "max_context": 300, "kv_slots": 1200} | ALWAYS
    tokens = SimpleNamespace(vocab_size=ByteTokens.vocab_size, eos_ids=frozenset(), decode=ByteTokens().decode)
    return Engine(model or real_model(), tokens, EngineConfig(**(sizes | options)))


def run(engine: Engine, prompt: list[int], count: int = 6) -> Request:
    """A request, and then whatever check it led to."""
    (request,) = engine.generate([prompt], greedy(count))
    while not engine.idle:
        engine.step()
    return request


def conversation(engine: Engine) -> list[tuple[str, Request, LogitComparison]]:
    """Hits of every kind: on the chunk grid, where a prompt or an answer ended, on answers of answers, at a branch point."""
    results, hits = results_of(engine), []

    def ask(kind: str, prompt: list[int]) -> list[int]:
        request = run(engine, prompt)
        hits.append((kind, request, results.pop()))
        assert results == []
        return [*prompt, *request.output]

    first = prompt_of(70, 1)
    run(engine, first)
    ask("grid", first)
    whole = prompt_of(43, 2)
    run(engine, whole, 0)
    ask("prompt end", [*whole, *prompt_of(20, 3)])
    said = prompt_of(37, 4)
    said += run(engine, said).output
    said = ask("answer end", [*said, *prompt_of(25, 5)])
    ask("answer of an answer", [*said, *prompt_of(5, 6)])
    ask("grid", [*first[:50], *prompt_of(30, 7)])
    ask("branch", [*first[:50], *prompt_of(30, 8)])
    assert [request.cached_tokens for _, request, _ in hits] == [64, 43, 42, 73, 48, 50]
    return hits


MODELS = {
    "gdn with attention": (real_model, Mode.CHUNKS, True),
    "mamba-2 with attention": (lambda: probed("granitemoehybrid"), Mode.CHUNKS, True),
    "mamba-2": (lambda: probed("mamba2"), Mode.CHUNKS, False),
    "mamba with attention, token by token": (lambda: probed("jamba"), Mode.TOKENS, True),
}


@pytest.mark.parametrize("name", MODELS)
def test_exact_checkpoints_show_no_drift_at_all(name: str) -> None:
    """With codec none the recomputation gives the same bits, whatever the hit; at a branch point all but the last ones.

    There the keys and values of the shared part are those of whoever came first, from a longer step than the state's.
    """
    build, mode, has_kv = MODELS[name]
    model = build()
    engine = real_engine(model)

    for kind, request, result in conversation(engine):
        exact = kind != "branch" or not has_kv
        assert max(result.kl_nats) <= (0.0 if exact else ROUNDING), kind
        assert all(result.agreed), kind
        assert len(result.kl_nats) == len(request.output)
    assert model.continuation.mode is mode
    assert (engine.kv is not None) is has_kv
    assert_clean(engine)


@pytest.mark.parametrize("name", list(MODELS)[:3])
def test_compressed_checkpoints_show_some_drift(name: str) -> None:
    """With int8 every hit differs from the recomputation, by more than rounding and less than a hundredth of a nat."""
    engine = real_engine(MODELS[name][0](), "int8")

    for kind, _, result in conversation(engine):
        assert ROUNDING < result.mean_kl_nats < 1e-2, kind
    assert_clean(engine)


def test_checks_change_nothing_else() -> None:
    """Sampled or not, the same prompts reuse the same tokens and give the same output, and nothing is held afterwards."""
    draw = random.Random(0)
    prompts = [[*prompt_of(draw.randint(1, 60), draw.randint(1, 3)), *prompt_of(draw.randint(1, 30), n)] for n in range(40)]
    told = []
    for rate in (0.0, 0.5, 1.0):
        engine = hash_engine(drift_rate=rate, drift_checks_per_minute=10**6, checkpoint_slots=6, kv_slots=300)
        results = results_of(engine)
        groups = [engine.generate(prompts[start : start + 4], greedy(6)) for start in range(0, 40, 4)]
        told.append([(request.output, request.cached_tokens) for group in groups for request in group])
        assert bool(results) == bool(rate)
        while not engine.idle:
            engine.step()
        assert_clean(engine)

    assert told[0] == told[1] == told[2]
    assert [output for output, _ in told[0]] == [expected(prompt, 6) for prompt in prompts]


def test_a_check_compares_the_last_prompt_token_and_sixteen_more() -> None:
    """Long outputs are checked as soon as enough was decoded, short ones when they end."""
    engine = real_engine()
    results = results_of(engine)
    prompt = prompt_of(40)
    run(engine, prompt, 0)

    for count, positions in ((0, 1), (1, 1), (2, 2), (MAX_POSITIONS, MAX_POSITIONS), (60, MAX_POSITIONS)):
        run(engine, [*prompt, *prompt_of(30, count)], count)
        assert len(results.pop().kl_nats) == positions
        assert results == []


def test_without_a_rate_there_is_no_check_and_no_memory_for_one() -> None:
    """With rate 0 nothing is sampled, counted, followed or set aside."""
    engine = real_engine(drift_rate=0.0)
    results = results_of(engine)

    run(engine, prompt_of(40))
    run(engine, prompt_of(40))

    assert results == []
    assert engine._checks._recomputation is None
    assert not engine._checks._history._ends


def test_every_hit_is_checked_or_skipped_at_rate_one() -> None:
    """With rate 1 there is one result for each hit, and none for a miss."""
    engine = hash_engine(**ALWAYS)
    results = results_of(engine)
    prompts = [prompt_of(30, seed % 5) for seed in range(30)]

    requests = [request for start in range(0, 30, 3) for request in engine.generate(prompts[start : start + 3], greedy(3))]
    while not engine.idle:
        engine.step()

    assert len(results) == sum(request.cached_tokens > 0 for request in requests) == 25
    assert 0 < results.count("skipped") < 25
    assert {result.mean_kl_nats for result in results if result != "skipped"} == {0.0}


class TimedModel(HashModel):
    """Each step takes a second of a clock; knows how many were a recomputation's."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.recomputed = 0
        self.served = 0

    def start(self, active, row, **options):
        session = super().start(active, row, **options)

        def timed(tokens, ids, run=session.run):
            self.clock.tick(1.0)
            alone = active.slots.capacity == 1
            self.recomputed += alone
            self.served += not alone
            return run(tokens, ids)

        session.run = timed
        return session


def timed_engine(**options) -> tuple[Engine, TimedModel]:
    model = TimedModel()
    config = EngineConfig(active_slots=2, codec="none", chunk=8, max_context=128, kv_slots=512, **(ALWAYS | options))
    return Engine(model, ByteTokens(), config, clock=model.clock), model


def test_a_check_ends_on_a_server_that_is_never_idle() -> None:
    """Under load a check gets its small share of the time, a slice at a step, and comes to its end."""
    engine, model = timed_engine()
    run(engine, prompt_of(60))
    results = results_of(engine)
    slices = []
    while not any(isinstance(result, LogitComparison) for result in results):
        while len(engine.scheduler.waiting) < 2:
            engine.submit(Request(prompt_of(60), greedy(8)))
        before = model.recomputed
        engine.step()
        slices.append(model.recomputed - before)
        assert not engine.scheduler.idle
        assert len(slices) < 5000

    assert results[-1].mean_kl_nats == 0.0
    assert set(slices) == {0, 1}
    assert 0.5 * BUSY_SHARE < (model.recomputed - 1) / (model.recomputed + model.served) <= BUSY_SHARE


def test_an_idle_engine_checks_a_slice_at_a_step() -> None:
    """Without requests every step runs one slice, so that whoever comes then waits for no more than that."""
    engine, model = timed_engine()
    run(engine, prompt_of(60))
    (request,) = engine.generate([prompt_of(60)], greedy(4))
    slices = []
    while not engine.idle:
        before = model.recomputed
        engine.step()
        slices.append(model.recomputed - before)

    assert request.cached_tokens == 56
    assert set(slices) == {1}


def test_a_recomputation_that_fails_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check is counted as failed, requests go on, and the next check is made."""
    model = HashModel()
    engine = hash_engine(model, telemetry=Telemetry(), **ALWAYS)
    results = results_of(engine)
    prompt = prompt_of(30)
    run(engine, prompt)
    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(model, "start", lambda *args, run=model.start, **options: failing(run(*args, **options), args[0]))
        request = run(engine, prompt)

    assert request.output == expected(prompt, 6)
    assert results == ["failed"]
    assert [(log["event"], log["error"]) for log in logs if log["log_level"] == "warning"] == [
        ("mamba_checkpoint.drift_check_failed", "ZeroDivisionError('division by zero')")
    ]
    run(engine, prompt)
    assert results[1].mean_kl_nats == 0.0
    assert_clean(engine)


def failing(session, active):
    if active.slots.capacity == 1:
        session.run = lambda *args: 1 / 0
    return session


@pytest.mark.parametrize("steps", range(1, 6))
def test_an_aborted_request_is_not_checked(steps: int) -> None:
    """A request that is aborted while its logits are collected counts as skipped, and makes room for the next."""
    engine = hash_engine(**ALWAYS)
    results = results_of(engine)
    prompt = prompt_of(30)
    run(engine, prompt)
    request = Request(prompt, greedy(8))
    engine.submit(request)
    for _ in range(steps):
        engine.step()

    engine.abort(request)
    run(engine, prompt)

    assert (request.finish.reason, results[0]) == ("abort", "skipped")
    assert [result.mean_kl_nats for result in results[1:]] == [0.0]
    assert_clean(engine)


def test_a_request_that_fails_is_not_checked() -> None:
    """The sample of a request whose model failed is dropped."""
    model = HashModel()
    engine = hash_engine(model, **ALWAYS)
    results = results_of(engine)
    prompt = prompt_of(30)
    run(engine, prompt)
    model.fail_at = 32
    failed = run(engine, prompt)

    assert (failed.finish.reason, results) == ("error", ["skipped"])
    assert_clean(engine)


def test_a_request_that_wants_its_prompts_logprobs_is_not_checked() -> None:
    """It computes its logits many at a time, whose last bits nothing could be compared with."""
    engine = real_engine()
    results = results_of(engine)
    prompt = prompt_of(40)
    run(engine, prompt)
    request = Request(prompt, greedy(2), logprobs=WantedLogprobs(prompt_from=0))
    engine.submit(request)
    while not engine.idle:
        engine.step()

    assert (request.cached_tokens, results) == (32, [])


def test_an_idle_thread_goes_on_with_its_check() -> None:
    """The engine's thread does not wait to be asked while a check is under way."""
    thread = EngineThread(lambda: hash_engine(**ALWAYS))
    thread.start()
    results = thread.call(results_of).result(5)
    for _ in range(2):
        ended = threading.Event()
        thread.submit(Request(prompt_of(100), greedy(8), notify=ended.set))
        assert ended.wait(5)
    for _ in range(100):
        if results or threading.Event().wait(0.02):
            break

    assert [result.mean_kl_nats for result in results] == [0.0]
    assert thread.stop(5)


def test_a_thread_stops_in_the_middle_of_a_check() -> None:
    """A check that never ends keeps no one from stopping the server, nor from being served first."""
    thread = EngineThread(lambda: hash_engine(**ALWAYS))
    thread.start()
    engine = thread.ready.result(5)
    thread.call(lambda engine: run(engine, prompt_of(30))).result(5)

    def endless(tokens, depths, *, ends):
        while True:
            yield

    engine._checks._recomputation.run = endless
    for _ in range(2):
        request, ended = Request(prompt_of(30), greedy(3)), threading.Event()
        request.notify = lambda request=request, ended=ended: ended.set() if request.finish else None
        thread.submit(request)
        assert ended.wait(5)
        assert request.output == expected(prompt_of(30), 3)

    assert not thread.call(lambda engine: engine.idle).result(5)
    assert thread.stop(5)


SHARED = prompt_of(64, 1)


def drift_after(fault=None, codec="none") -> float:
    """The mean KL of one hit at depth 64, where ``fault`` has been at the restored slot before the request goes on."""
    engine = real_engine(codec=codec)
    results = results_of(engine)
    for prompt in (SHARED[:63], SHARED, prompt_of(64, 3)):
        run(engine, prompt, 0)
    restore = engine.cache.restore

    def restored(lease, slot) -> None:
        restore(lease, slot)
        if fault is not None:
            fault(engine.cache, slot)

    engine.cache.restore = restored
    results.clear()
    request = run(engine, [*SHARED, *prompt_of(9, 2)])
    assert request.cached_tokens == 64
    return results[-1].mean_kl_nats


def state_of(cache, prompt: list[int], slot) -> None:
    """Restore the checkpoint of another prompt into the slot."""
    lease = cache.match_prefix([*prompt, 0])
    assert lease.depth == len(prompt)
    cache.checkpoints.restore(lease.node.checkpoint.slot, cache.active, slot)
    cache.release(lease)


def one_token_early(cache, slot) -> None:
    state_of(cache, SHARED[:63], slot)


def of_another_request(cache, slot) -> None:
    state_of(cache, prompt_of(64, 3), slot)


def conv_window_of_another_request(cache, slot) -> None:
    state = cache.active.state[:, slot.index].clone()
    of_another_request(cache, slot)
    cache.active.state[:, slot.index] = state


def heads_swapped(cache, slot) -> None:
    state = cache.active.state[:, slot.index]
    state.copy_(state.flip(1))


def state_wiped(cache, slot) -> None:
    cache.active.zero(slot)


class WrongAxis(Int8Codec):
    """Scales its states back along the other axis."""

    def _decode(self, row, like):
        return (row["q"].float() * row["scale"].float().transpose(-1, -2)).to(like.dtype)


FAULTS = [one_token_early, of_another_request, conv_window_of_another_request, heads_swapped, state_wiped]


def test_faults_of_state_stand_out() -> None:
    """Whatever is restored wrongly shows as a drift far above what int8 costs, and exact checkpoints show none."""
    exact, compressed = drift_after(), drift_after(codec="int8")
    faults = {fault.__name__: drift_after(fault) for fault in FAULTS}
    faults["scale along the wrong axis"] = drift_after(codec=WrongAxis())

    assert exact == 0.0
    assert 0 < compressed < 1e-3
    assert {name: drift for name, drift in faults.items() if drift < 50 * compressed} == {}
