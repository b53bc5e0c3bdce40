"""The engine: what it reuses, what it gives back, and that nobody can tell from the output."""

from __future__ import annotations

import random
from http import HTTPStatus
from types import SimpleNamespace

import pytest
import torch
from hash_model import HashModel, assert_clean, expected, greedy, hash_engine
from serving_side import real_model
from tiny_models import VOCAB, tiny_model

from mamba_checkpoint_cache import Telemetry
from mamba_checkpoint_cache.integrations.continuation import Mode
from mamba_checkpoint_cache.integrations.probe import prepare_model
from mamba_checkpoint_cache.serving.config import EngineConfig
from mamba_checkpoint_cache.serving.engine import Engine
from mamba_checkpoint_cache.serving.request import Request
from mamba_checkpoint_cache.serving.sampling import Sampling
from mamba_checkpoint_cache.serving.tokens import END_OF_TEXT, ByteTokens


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def run(engine: Engine, prompt: list[int], count: int = 4) -> Request:
    return engine.generate([prompt], greedy(count))[0]


def prompts_that_share(seed: int, count: int, longest: int) -> list[list[int]]:
    """Prompts that extend, repeat or fork off each other's, or are new."""
    draw = random.Random(seed)
    prompts: list[list[int]] = []
    for _ in range(count):
        stem = draw.choice(prompts) if prompts and draw.random() < 0.7 else []
        cut = draw.choice([len(stem), draw.randint(0, len(stem))])
        prompts.append((stem[:cut] + draw.choices(range(256), k=draw.randint(0 if cut else 1, 30)))[:longest])
    return prompts


@pytest.mark.parametrize("has_kv", [True, False])
def test_output_is_the_models_own(has_kv: bool) -> None:
    """A request's output is what its model gives for the prompt, chunk by chunk and then token by token."""
    prompt = prompt_of(21)

    request = run(hash_engine(HashModel(has_kv)), prompt, 5)

    assert request.output == expected(prompt, 5, has_kv)
    assert (request.finish.reason, request.cached_tokens) == ("length", 0)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 17, 40])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_prompt_sent_twice_reuses_the_last_chunk_boundary_below_its_length(length: int, page_size: int) -> None:
    """The second time, at least all whole chunks of the prompt but the one that holds its last token's successor are reused."""
    engine, prompt = hash_engine(page_size=page_size), prompt_of(length)

    first, second = run(engine, prompt), run(engine, prompt)

    assert second.cached_tokens >= (length - 1) // 8 * 8
    assert first.output == second.output == expected(prompt, 4)


def test_chunks_end_at_absolute_multiples() -> None:
    """A request that resumes off the grid runs one short chunk, and is on the grid from there on."""
    model = HashModel()
    engine, prompt = hash_engine(model), prompt_of(20)
    answer = run(engine, prompt, 3).output
    model.steps.clear()

    request = run(engine, [*prompt, *answer, *prompt_of(20)], 1)

    assert request.cached_tokens == 22
    assert model.steps == [(22, 24), (24, 32), (32, 40), (40, 43)]


def test_the_end_of_a_request_can_be_continued_from() -> None:
    """A chat's next turn reuses all of the last one but its very last token, which never ran."""
    engine, prompt = hash_engine(), prompt_of(19)
    answer = run(engine, prompt, 6).output

    request = run(engine, [*prompt, *answer, 1, 2, 3])

    assert request.cached_tokens == 19 + 6 - 1


def test_faults_23_the_third_request_of_a_branch_hits() -> None:
    """faults.md 23: a shared part that ends inside a chunk is checkpointed when it is seen again, and reused from then on."""
    engine, shared = hash_engine(), prompt_of(13)

    reused = [run(engine, [*shared, 256 - seed, *prompt_of(9, seed)]).cached_tokens for seed in (1, 2, 3)]

    assert reused == [0, 8, 13]


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("has_kv", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_pools_of_any_size_change_no_output(page_size: int, has_kv: bool, seed: int) -> None:
    """However few the slots and however many the evictions, every output is the model's own, and nothing is lost."""
    draw = random.Random(seed)
    engine = hash_engine(
        HashModel(has_kv),
        page_size=page_size,
        active_slots=draw.randint(1, 4),
        checkpoint_slots=draw.choice([1, 2, 3, 30]),
        max_context=100,
        kv_slots=draw.choice([100, 130, 1000]),
    )
    prompts = prompts_that_share(seed, 40, 92)

    requests = [request for start in range(0, 40, 5) for request in engine.generate(prompts[start : start + 5], greedy(8))]

    assert [request.output for request in requests] == [expected(prompt, 8, has_kv) for prompt in prompts]
    if engine.config.checkpoint_slots == 30:
        assert sum(request.cached_tokens for request in requests) > 100
    assert_clean(engine)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("slots", [6, 40])
def test_a_real_model_gives_the_same_tokens_with_and_without_the_cache(page_size: int, slots: int) -> None:
    """Greedy output of a GDN hybrid with exact checkpoints equals that of the same chunks from the start, token for token."""
    sizes = {"codec": "none", "chunk": 16, "page_size": page_size, "max_context": 150, "kv_slots": 300, "active_slots": 3}
    cached = Engine(real_model(), ByteTokens(), EngineConfig(checkpoint_slots=slots, **sizes))
    plain = Engine(real_model(), ByteTokens(), EngineConfig(checkpoint_slots=1, caching=False, **sizes))
    prompts = prompts_that_share(slots + page_size, 24, 140)

    groups = [prompts[start : start + 6] for start in range(0, 24, 6)]
    with_cache = [request for group in groups for request in cached.generate(group, greedy(8))]
    without = [request for group in groups for request in plain.generate(group, greedy(8))]

    assert [request.output for request in with_cache] == [request.output for request in without]
    assert sum(request.cached_tokens for request in with_cache) > 0 == sum(request.cached_tokens for request in without)
    assert_clean(cached)
    assert_clean(plain)


@pytest.mark.parametrize(("name", "mode"), [("mamba2", Mode.CHUNKS), ("mamba", Mode.TOKENS), ("jamba", Mode.TOKENS)])
def test_models_of_other_kinds_give_the_same_tokens_too(name: str, mode: Mode) -> None:
    """Without KV, or continued token by token as the probe demands, the cache changes no output either."""
    model = prepare_model(tiny_model(name))
    tokens = SimpleNamespace(vocab_size=VOCAB, eos_ids=frozenset())
    sizes = {"codec": "none", "chunk": 16, "max_context": 100, "kv_slots": 300}
    cached, plain = (Engine(model, tokens, EngineConfig(caching=caching, **sizes)) for caching in (True, False))
    prompts = [[token % VOCAB for token in prompt] for prompt in prompts_that_share(7, 8, 80)]

    reused = 0
    for prompt in prompts:
        (with_cache,), (without,) = (engine.generate([prompt], greedy(4)) for engine in (cached, plain))
        assert with_cache.output == without.output
        reused += with_cache.cached_tokens

    assert (model.continuation.mode, reused > 0) == (mode, True)
    assert_clean(cached)


def test_a_lossy_codec_serves_a_real_model() -> None:
    """int8 checkpoints are reused just the same."""
    sizes = {"chunk": 16, "max_context": 150, "kv_slots": 600, "checkpoint_slots": 8}
    engine = Engine(real_model(), ByteTokens(), EngineConfig(**sizes))

    first, second = (run(engine, prompt_of(40)) for _ in range(2))

    assert (first.cached_tokens, second.cached_tokens) == (0, 32)
    assert len(second.output) == 4
    assert_clean(engine)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("has_kv", [True, False])
def test_faults_6_an_abort_after_any_step_gives_everything_back(page_size: int, has_kv: bool) -> None:
    """faults.md 6: whenever a request is aborted, the pools return to where they were, and the others never notice."""
    shared = prompt_of(13)
    prompts = [shared, [*shared, 1, *prompt_of(12, 1)], [*shared, 2, *prompt_of(20, 2)], [*shared, 1, 9]]
    for when in range(14):
        engine = hash_engine(HashModel(has_kv), page_size=page_size, checkpoint_slots=4, kv_slots=140)
        run(engine, shared)
        requests = [Request(prompt, greedy(5)) for prompt in prompts]
        for request in requests:
            engine.submit(request)
        for _ in range(when):
            engine.step()
        engine.abort(requests[when % 4])
        engine.cache.check()
        while not engine.scheduler.idle:
            engine.step()

        for number, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
            if number == when % 4 and request.finish.reason == "abort":
                assert request.output == expected(prompt, 5, has_kv)[: len(request.output)]
            else:
                assert request.output == expected(prompt, 5, has_kv)
        assert_clean(engine)


def test_an_abort_twice_is_an_abort_once() -> None:
    """A request that has ended stays as it ended."""
    engine = hash_engine()
    request = run(engine, prompt_of(5))

    engine.abort(request)

    assert request.finish.reason == "length"
    assert_clean(engine)


@pytest.mark.parametrize("fail_at", [1, 8, 9, 20, 23])
def test_a_failing_step_fails_one_request(fail_at: int) -> None:
    """An exception in the model ends that request with a 500 and frees what it held; the engine goes on."""
    model = HashModel()
    engine, prompt = hash_engine(model), prompt_of(20)
    model.fail_at = fail_at

    failed = run(engine, prompt)
    model.fail_at = None

    assert (failed.finish.reason, failed.finish.status) == ("error", HTTPStatus.INTERNAL_SERVER_ERROR)
    assert "ArithmeticError" in failed.finish.message
    assert run(engine, prompt).output == expected(prompt, 4)
    assert_clean(engine)


def test_a_failing_restore_fails_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that can't be started leaves neither its slot nor its lease behind."""
    engine = hash_engine()
    run(engine, prompt_of(20))
    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "start", lambda *args, **options: 1 / 0)
        failed = run(engine, prompt_of(20))

    assert failed.finish.status == HTTPStatus.INTERNAL_SERVER_ERROR
    assert_clean(engine)


def test_nan_logits_fail_the_request() -> None:
    """A model that gives NaN gives no token, and its state is not kept."""
    model = HashModel()
    engine = hash_engine(model)
    start = model.start

    def poisoned(*args, **options):
        session = start(*args, **options)
        session.run = lambda tokens, ids=(), go=session.run: go(tokens, ids) * torch.nan
        return session

    model.start = poisoned
    request = run(engine, prompt_of(5))

    assert (request.finish.status, request.output) == (HTTPStatus.INTERNAL_SERVER_ERROR, [])
    assert engine.cache.checkpoints.slots.counts.free == engine.config.checkpoint_slots
    assert_clean(engine)


def test_faults_2_requests_wait_for_active_slots() -> None:
    """faults.md 2: more requests than slots wait their turn, and the shortage costs no checkpoint and is counted once."""
    telemetry = Telemetry()
    engine = hash_engine(active_slots=2, telemetry=telemetry)

    requests = engine.generate([prompt_of(10, seed) for seed in range(7)], greedy(3))

    assert [request.output for request in requests] == [expected(prompt_of(10, seed), 3) for seed in range(7)]
    counted = {
        outcome: telemetry.registry.get_sample_value(
            "mamba_checkpoint_slot_allocations_total", {"cache": "default", "pool": "active", "outcome": outcome}
        )
        for outcome in ("ok", "exhausted")
    }
    assert counted["ok"] == 7
    assert 1 <= counted["exhausted"] <= 7
    assert_clean(engine)


def test_requests_wait_for_kv() -> None:
    """Requests whose KV does not fit together run one after the other, on what the tree can spare."""
    engine = hash_engine(max_context=60, kv_slots=100)
    prompts = [prompt_of(50, seed) for seed in range(4)]
    requests = [Request(prompt, greedy(10)) for prompt in prompts]
    most = 0
    for request in requests:
        engine.submit(request)
    while not engine.scheduler.idle:
        engine.step()
        most = max(most, len(engine.scheduler.running))

    assert [request.output for request in requests] == [expected(prompt, 10) for prompt in prompts]
    assert most == 1
    assert_clean(engine)


@pytest.mark.parametrize(
    ("prompt", "count", "message"),
    [
        ([], 1, "empty"),
        ([0, END_OF_TEXT + 1], 1, "0 … 256"),
        ([-1], 1, "0 … 256"),
        ([1] * 100, 29, "100 prompt tokens and 29 new ones exceed the 128"),
        ([1], 10**30, "exceed the 128"),
    ],
)
def test_what_can_never_run_is_refused(prompt: list[int], count: int, message: str) -> None:
    """An empty, over-long or foreign prompt raises at once, with the numbers."""
    engine = hash_engine()

    with pytest.raises(ValueError, match=message):
        engine.submit(Request(prompt, greedy(count)))

    assert_clean(engine)


def test_the_longest_request_fits() -> None:
    """A request of exactly the context limit runs, also when the KV slots hold no more than that."""
    engine = hash_engine(max_context=100, kv_slots=100)

    assert run(engine, prompt_of(90), 10).output == expected(prompt_of(90), 10)
    assert run(engine, prompt_of(90, 1), 10).output == expected(prompt_of(90, 1), 10)
    assert_clean(engine)


def test_kv_for_less_than_one_request_is_refused() -> None:
    """An engine whose KV can't hold its longest request is not built."""
    with pytest.raises(ValueError, match="got 99 and 100"):
        EngineConfig(max_context=100, kv_slots=99)


def test_a_full_queue_refuses() -> None:
    """Beyond the queue's length a request ends with 503 at once."""
    engine = hash_engine(max_waiting=2)
    requests = [Request([1], greedy(1)) for _ in range(3)]

    for request in requests:
        engine.submit(request)

    assert [request.finish and request.finish.status for request in requests] == [None, None, HTTPStatus.SERVICE_UNAVAILABLE]


def test_nothing_to_generate_still_fills_the_cache() -> None:
    """With max_new_tokens 0 the prompt is run and kept, and nothing comes out."""
    engine, prompt = hash_engine(), prompt_of(12)

    request = run(engine, prompt, 0)

    assert (request.output, request.finish.reason) == ([], "length")
    assert run(engine, [*prompt, 1]).cached_tokens == 12


def test_end_tokens_and_stop_texts_end_a_request() -> None:
    """The first end token, stop token or stop text ends the output, and the finish says which."""
    prompt = prompt_of(9)
    output = expected(prompt, 12)
    plain = hash_engine().generate([prompt], greedy(12, stop_ids=frozenset({output[3]})))[0]
    engine = hash_engine()
    engine.tokens.eos_ids = frozenset({output[2]})
    ended = engine.generate([prompt], Sampling(max_new_tokens=12))[0]
    texts = hash_engine().generate([prompt], greedy(12, stop_texts=("never", ByteTokens().decode(output[4:6]))))[0]

    assert (plain.output, plain.finish.reason, plain.finish.matched) == (output[: output.index(output[3]) + 1], "stop", output[3])
    assert (ended.output, ended.finish.matched) == (output[: output.index(output[2]) + 1], output[2])
    assert texts.finish.reason == "stop"
    assert texts.output == output[: len(texts.output)]
    assert len(texts.output) <= 6


def test_prefills_take_turns_and_decodes_never_wait() -> None:
    """While long prompts are prefilled a chunk at a time, in turn, everyone who decodes gets a token in every step."""
    engine = hash_engine()
    short = Request(prompt_of(3), greedy(12))
    long = [Request(prompt_of(60, seed), greedy(1)) for seed in (1, 2)]
    engine.submit(short)
    engine.step()
    for request in long:
        engine.submit(request)
    depths, tokens = [], []
    for _ in range(8):
        engine.step()
        depths.append([running.session.depth for running in sorted(engine.scheduler.running, key=lambda r: r.request.id)][1:])
        tokens.append(len(short.output))

    assert tokens == list(range(2, 10))
    assert all(abs(first - second) <= 8 for first, second in depths)


def test_flush_keeps_what_runs() -> None:
    """A flush in the middle of a request frees the rest, and the request goes on."""
    engine = hash_engine()
    run(engine, prompt_of(30, 1))
    request = Request(prompt_of(20), greedy(4))
    engine.submit(request)
    engine.step()

    freed = engine.flush()
    while not engine.scheduler.idle:
        engine.step()

    assert freed.checkpoints > 0
    assert request.output == expected(prompt_of(20), 4)
    assert_clean(engine)
