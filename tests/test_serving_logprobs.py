"""Log-probabilities: what the engine computes, and SGLang's shape for it over HTTP."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from hash_model import greedy
from prometheus_client import CollectorRegistry
from serving_side import real_model

from mamba_checkpoint_cache.serving.config import EngineConfig
from mamba_checkpoint_cache.serving.engine import Engine
from mamba_checkpoint_cache.serving.engine_thread import EngineThread
from mamba_checkpoint_cache.serving.http.app import build_app
from mamba_checkpoint_cache.serving.http.service import Service
from mamba_checkpoint_cache.serving.logprobs import TokenLogprob, WantedLogprobs, token_logprobs
from mamba_checkpoint_cache.serving.recompute import Recomputation, drained
from mamba_checkpoint_cache.serving.request import Request
from mamba_checkpoint_cache.serving.sampling import NonFiniteLogitsError, Sampling
from mamba_checkpoint_cache.serving.tokens import ByteTokens

CHUNK = 16
VOCAB = ByteTokens.vocab_size


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(97, 123), k=length)


def engine(**options: Any) -> Engine:
    sizes = {"codec": "none", "chunk": CHUNK, "max_context": 200, "kv_slots": 1200}
    return Engine(real_model(), ByteTokens(), EngineConfig(**(sizes | options)))


def run(subject: Engine, prompt: list[int], sampling: Sampling, wanted: WantedLogprobs | None) -> Request:
    request = Request(prompt, sampling, logprobs=wanted)
    subject.submit(request)
    while not subject.scheduler.idle:
        subject.step()
    assert request.finish is not None
    assert request.finish.reason == "length", request.finish.message
    return request


def logprobs_of(prompt: list[int], output: list[int]) -> torch.Tensor:
    """The distributions that the output was chosen from, ``[len(output), vocabulary]``: the model's own, without a cache."""
    depths = range(len(prompt), len(prompt) + len(output))
    ends = [*range(CHUNK, len(prompt), CHUNK), *depths]
    return drained(Recomputation(real_model()).run([*prompt, *output], depths, ends=ends)).double().log_softmax(-1)


@pytest.mark.parametrize("sampling", [greedy(6), greedy(6, temperature=1.7, top_p=0.5, seed=3)], ids=["greedy", "drawn"])
def test_output_logprobs_are_those_of_the_raw_logits(sampling: Sampling) -> None:
    """Each output token comes with the natural log of the softmax of the model's logits, whatever the temperature."""
    prompt = prompt_of(40)

    request = run(engine(), prompt, sampling, WantedLogprobs())

    expected = logprobs_of(prompt, request.output)
    assert [one.token for one in request.output_logprobs] == request.output
    assert [one.logprob for one in request.output_logprobs] == [float(expected[i, t]) for i, t in enumerate(request.output)]


def test_the_whole_vocabulary_is_the_whole_distribution() -> None:
    """With as many likeliest tokens as there are, all of them come, likeliest first, and their probabilities add up to one."""
    prompt = prompt_of(40)

    request = run(engine(), prompt, greedy(3), WantedLogprobs(top=VOCAB))

    for row, one in zip(logprobs_of(prompt, request.output), request.output_logprobs, strict=True):
        assert sorted(token for _, token in one.top) == list(range(VOCAB))
        assert all(logprob == float(row[token]) for logprob, token in one.top)
        assert [logprob for logprob, _ in one.top] == sorted((logprob for logprob, _ in one.top), reverse=True)
        assert sum(math.exp(logprob) for logprob, _ in one.top) == pytest.approx(1.0, abs=1e-12)
        assert one.top[0][1] == one.token


@pytest.mark.parametrize("start", [0, 1, 15, 16, 30, 48])
def test_prompt_logprobs_from_a_token_on(start: int) -> None:
    """From the token after ``prompt_from`` on, each prompt token has the log-probability it had after those before it."""
    prompt = prompt_of(49)

    request = run(engine(), prompt, greedy(2), WantedLogprobs(top=2, prompt_from=start))

    assert [one.token for one in request.prompt_logprobs] == prompt[start:]
    assert request.prompt_logprobs[0] == TokenLogprob(prompt[start])
    assert not request.lacks_prompt_logprobs(51)
    pool, model = real_model().active_pool(1), real_model()
    every = model.start(pool, 1, kv=model.kv_store(49)).run(prompt, range(1, 50), every=True).double().log_softmax(-1)
    for place, one in enumerate(request.prompt_logprobs[1:], start + 1):
        assert one.logprob == pytest.approx(float(every[place - 1, prompt[place]]), abs=1e-4)
        assert one.top[0][0] == pytest.approx(float(every[place - 1].max()), abs=1e-4)
        assert len(one.top) == 2


@pytest.mark.parametrize("start", [0, 20, 32, 33, 40, 44])
def test_what_was_reused_has_no_logprobs(start: int) -> None:
    """Nothing is known of prompt tokens that were not computed again; for those that were, the same as without a cache."""
    prompt, subject = prompt_of(45), engine()
    fresh = run(subject, prompt, greedy(2), WantedLogprobs(prompt_from=start))
    subject.flush()
    run(subject, prompt[:33], greedy(0), None)

    again = run(subject, prompt, greedy(2), WantedLogprobs(prompt_from=start))

    assert again.cached_tokens == 33
    assert [one.token for one in again.prompt_logprobs] == prompt[start:]
    known = [place for place, one in enumerate(again.prompt_logprobs, start) if one.logprob is not None]
    assert known == list(range(max(start, 33) + 1, 45))
    for before, after in zip(fresh.prompt_logprobs, again.prompt_logprobs, strict=True):
        assert after.logprob is None or after.logprob == pytest.approx(before.logprob, abs=1e-4)


def test_asking_changes_no_output() -> None:
    """The tokens are those of a request that asks for nothing, which is given nothing."""
    prompt = prompt_of(40)

    silent, asked = (run(engine(), prompt, greedy(8), wanted) for wanted in (None, WantedLogprobs(top=3, prompt_from=0)))

    assert silent.output == asked.output
    assert (silent.output_logprobs, silent.prompt_logprobs) == ([], [])


def test_no_token_is_seen_before_its_logprob() -> None:
    """Whoever reads from another thread finds a log-probability for each output token at any moment."""
    request = Request(prompt_of(5), greedy(3), logprobs=WantedLogprobs())

    class Watched(list):
        def append(self, token: int) -> None:
            assert len(request.output_logprobs) == len(self) + 1
            super().append(token)

    request.output = Watched()
    for token in (7, 8, 9):
        request.add_output(token, torch.zeros(VOCAB))

    assert (request.output, len(request.output_logprobs)) == ([7, 8, 9], 3)


def test_logits_that_are_not_finite_have_no_logprobs() -> None:
    """NaN is a failure, not a number in an answer."""
    with pytest.raises(NonFiniteLogitsError):
        token_logprobs(torch.tensor([[0.0, float("nan")]]), [0], 1)


def test_the_engine_refuses_what_there_is_not() -> None:
    """Tokens beyond the prompt or the vocabulary, and negative numbers."""
    subject = engine()

    for wanted, message in (
        (WantedLogprobs(prompt_from=5), "from token 5 of a prompt of 5"),
        (WantedLogprobs(top=VOCAB + 1), f"the {VOCAB + 1} likeliest tokens are wanted, of a vocabulary of {VOCAB}"),
    ):
        with pytest.raises(ValueError, match=message):
            subject.submit(Request(prompt_of(5), greedy(1), logprobs=wanted))
    with pytest.raises(ValueError, match="0 or more, got -1 and None"):
        WantedLogprobs(top=-1)


class Front:
    """The HTTP front over an engine's thread, all in this process."""

    def __init__(self) -> None:
        self.thread = EngineThread(engine)
        self.thread.start()
        self.thread.ready.result(30)
        self.app = build_app(Service(self.thread, CollectorRegistry(), created=0))

    def post(self, body: dict[str, Any], path: str = "/generate") -> httpx.Response:
        async def call() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://server") as client:
                return await client.post(path, json=body)

        return asyncio.run(call())

    def generate(self, prompt: Any, count: int = 4, **fields: Any) -> Any:
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": count, "ignore_eos": True}, **fields}
        response = self.post(body)
        assert response.status_code == 200, response.text
        return response.json()


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    front = Front()
    yield front
    assert front.thread.stop(5)


def test_output_logprobs_in_sglangs_shape(front: Front) -> None:
    """``meta_info`` has ``[log-probability, token id, null]`` for each output token, and so many likeliest beside each."""
    meta = (answer := front.generate(prompt_of(20), return_logprob=True, top_logprobs_num=3))["meta_info"]

    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[token, None] for token in answer["output_ids"]]
    assert [len(entries) for entries in meta["output_top_logprobs"]] == [3] * 4
    assert [entries[0] for entries in meta["output_top_logprobs"]] == meta["output_token_logprobs"]
    assert (meta["input_token_logprobs"], meta["input_top_logprobs"]) == ([], [])


def test_input_logprobs_in_sglangs_shape(front: Front) -> None:
    """They cover the prompt from ``logprob_start_len`` on; the first entry is null, and so are those that were reused."""
    prompt = prompt_of(50, seed=7)
    fields = {"return_logprob": True, "logprob_start_len": 10, "top_logprobs_num": 2}

    fresh, again = (front.generate(prompt, **fields)["meta_info"] for _ in range(2))

    for meta in (fresh, again):
        assert len(meta["input_token_logprobs"]) + 10 == meta["prompt_tokens"] == len(meta["input_top_logprobs"]) + 10
        assert [entry[1] for entry in meta["input_token_logprobs"]] == prompt[10:]
        assert [entry[0] is None for entry in meta["input_token_logprobs"]] == [
            entries is None for entries in meta["input_top_logprobs"]
        ]
    assert [entry[0] for entry in fresh["input_token_logprobs"]].count(None) == 1
    assert [entry[0] for entry in again["input_token_logprobs"]].count(None) == 48 - 10 + 1
    assert again["cached_tokens"] == 48


def test_without_asking_there_are_none(front: Front) -> None:
    """A call that does not ask for them gets none, nor one that asks for nothing by habit."""
    for fields in ({}, {"return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0}):
        assert not any("logprobs" in key for key in front.generate(prompt_of(9), **fields)["meta_info"])
    asked = front.generate(prompt_of(9), return_logprob=True)["meta_info"]
    assert {key for key in asked if "logprobs" in key} == {"input_token_logprobs", "output_token_logprobs"}


def test_texts_on_demand(front: Front) -> None:
    """With ``return_text_in_logprobs`` every entry has its token's text."""
    fields = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1, "return_text_in_logprobs": True}
    answer = front.generate(list(b"some words"), **fields)

    meta = answer["meta_info"]
    assert "".join(text for _, _, text in meta["input_token_logprobs"]) == "some words"
    assert meta["output_top_logprobs"][0][0][2] == bytes([answer["output_ids"][0]]).decode(errors="replace")


def test_a_list_of_prompts_has_logprobs_each(front: Front) -> None:
    """Each of several prompts gets its own."""
    answers = front.generate([prompt_of(9), prompt_of(12, 1)], return_logprob=True)

    assert [len(answer["meta_info"]["output_token_logprobs"]) for answer in answers] == [4, 4]


def test_a_stream_has_the_logprobs_so_far(front: Front) -> None:
    """Every event has an entry for each of its output tokens."""
    body = {"input_ids": prompt_of(20), "sampling_params": {"max_new_tokens": 9, "ignore_eos": True}, "stream": True}
    lines = front.post(body | {"return_logprob": True, "top_logprobs_num": 1}).text.split("\n\n")

    events = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
    for event in events:
        assert [entry[1] for entry in event["meta_info"]["output_token_logprobs"]] == event["output_ids"]
        assert len(event["meta_info"]["output_top_logprobs"]) == len(event["output_ids"])
    assert len(events[-1]["output_ids"]) == 9


def test_a_client_can_compute_the_exact_divergence_of_two_runs(front: Front) -> None:
    """From the whole distributions of a cached and an uncached run of exact states: none at all, to the last bit.

    Both take the same steps, as the shared part ends with a chunk.
    """
    prompt = prompt_of(60, seed=5)
    runs = []
    for shared in (prompt_of(1, seed=6), prompt[:48]):
        front.thread.call(Engine.flush).result(5)
        front.generate(shared, 0)
        runs.append(front.generate(prompt, 8, return_logprob=True, top_logprobs_num=VOCAB))

    assert [answer["meta_info"]["cached_tokens"] for answer in runs] == [0, 48]
    fresh, cached = (
        [{token: logprob for logprob, token, _ in entries} for entries in answer["meta_info"]["output_top_logprobs"]]
        for answer in runs
    )
    for p, q in zip(fresh, cached, strict=True):
        assert sum(math.exp(p[token]) for token in p) == pytest.approx(1.0)
        assert sum(math.exp(p[token]) * (p[token] - q[token]) for token in p) == 0.0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"logprob_start_len": 0}, "logprob_start_len asks for log-probabilities: set return_logprob too"),
        ({"top_logprobs_num": 2}, "top_logprobs_num asks for log-probabilities: set return_logprob too"),
        ({"return_logprob": 1}, "return_logprob must be true or false"),
        ({"return_logprob": True, "logprob_start_len": 9}, "from token 9 of a prompt of 9"),
        ({"return_logprob": True, "logprob_start_len": -2}, "logprob_start_len must be -1 or more, got -2"),
        ({"return_logprob": True, "logprob_start_len": [0]}, "logprob_start_len must be a whole number, got a list"),
        ({"return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num must be 0 or more, got -1"),
        ({"return_logprob": True, "top_logprobs_num": VOCAB + 1}, f"of a vocabulary of {VOCAB}"),
        ({"return_logprob": True, "token_ids_logprob": [1]}, "token_ids_logprob is not supported"),
        ({"return_logprob": True, "top_logprobs_num": 10**6}, "likeliest tokens at 4 positions are more than"),
    ],
)
def test_what_can_not_be_had_is_a_400(front: Front, fields: dict[str, Any], words: str) -> None:
    """Log-probabilities that are out of range, too many, or described but not asked for."""
    response = front.post({"input_ids": prompt_of(9), "sampling_params": {"max_new_tokens": 4}, **fields})

    assert (response.status_code, words in response.json()["error"]["message"]) == (400, True), response.text
