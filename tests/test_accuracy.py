"""What the cache costs in accuracy, seen over HTTP from a server process: both shipped models, natively and in int8."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from serving_side import ServerProcess
from torch import Tensor

from mamba_checkpoint_cache.drift.logits import kl_nats
from mamba_checkpoint_cache.small_models import SMALL_MODELS
from mamba_checkpoint_cache.small_models.recall import recall_prompts
from mamba_checkpoint_cache.small_models.text import held_out_text

CHUNK = 64
VOCAB_SIZE = 257
NUM_PROMPTS = 8
DECODED = 24
WARM_TOKENS, OFF_GRID_TOKENS, PROMPT_TOKENS = 4 * CHUNK, 4 * CHUNK - 17, 4 * CHUNK + 2
OTHER_STEPS_KL = 1e-9
"""What rounding makes of a state that was computed in other chunks; int8 lies a thousand times above it."""
INT8_KL = 1e-4
"""Some ten times what int8 costs these models; a state of another depth, or swapped heads, cost a hundred times as much."""
NUM_RECALL_PROMPTS = 6

pytestmark = pytest.mark.slow


class Client:
    """A server of one model and codec, asked for whole next-token distributions."""

    def __init__(self, server: ServerProcess, codec: str) -> None:
        self.codec = codec
        self._http = server.client

    def flush(self) -> None:
        self._http.post("/flush_cache").raise_for_status()

    def generate(self, tokens: list[int], new_tokens: int) -> dict[str, Any]:
        sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": tokens, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": VOCAB_SIZE}
        response = self._http.post("/generate", json=body)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer


def cached_tokens(answer: dict[str, Any]) -> int:
    return int(answer["meta_info"]["cached_tokens"])


def distributions(answer: dict[str, Any]) -> Tensor:
    """``[output tokens, vocabulary]`` log-probabilities, float64."""
    rows = answer["meta_info"]["output_top_logprobs"]
    result = torch.full((len(rows), VOCAB_SIZE), -math.inf, dtype=torch.float64)
    for position, row in enumerate(rows):
        for logprob, token, _ in row:
            result[position, token] = logprob
    return result


def kl_while_alike(reference: dict[str, Any], other: dict[str, Any]) -> list[float]:
    """The KL at each token, up to where the two greedy outputs part."""
    outputs = zip(reference["output_ids"], other["output_ids"], strict=True)
    alike = next((i for i, (a, b) in enumerate(outputs) if a != b), len(reference["output_ids"]) - 1)
    return kl_nats(distributions(reference)[: alike + 1], distributions(other)[: alike + 1]).tolist()


@pytest.fixture(scope="module", params=[(name, codec) for name in SMALL_MODELS for codec in ("none", "int8")], ids="-".join)
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    model, codec = request.param
    options = ("--model", model, "--codec", codec, "--chunk", str(CHUNK), "--threads", "1", "--drift-rate", "0")
    with ServerProcess("serve", "--port", "0", *options) as server:
        server.wait_until_listening()
        yield Client(server, codec)


def prefix_hits(client: Client, warm_tokens: int) -> list[float]:
    """KL of prompts that resume from a prefix stored by another request, against the same prompts from the start."""
    found = []
    for seed in range(NUM_PROMPTS):
        prompt = list(held_out_text(PROMPT_TOKENS, seed=seed))
        client.flush()
        cold = client.generate(prompt, DECODED)
        client.flush()
        client.generate(prompt[:warm_tokens], 1)
        hit = client.generate(prompt, DECODED)
        assert cached_tokens(cold) == 0
        assert cached_tokens(hit) == warm_tokens
        found += kl_while_alike(cold, hit)
    return found


def test_a_prefix_hit_on_the_chunk_grid(client: Client) -> None:
    """Resumed at the end of a chunk, the operations are those of a run from the start: natively, so is every bit."""
    found = prefix_hits(client, WARM_TOKENS)

    if client.codec == "none":
        assert set(found) == {0.0}
    else:
        assert 0 < sum(found) / len(found) < INT8_KL


def test_a_prefix_hit_off_the_chunk_grid(client: Client) -> None:
    """Resumed within a chunk, the steps are others, and natively nothing but rounding differs."""
    found = prefix_hits(client, OFF_GRID_TOKENS)

    if client.codec == "none":
        assert max(found) < OTHER_STEPS_KL
    else:
        assert OTHER_STEPS_KL < sum(found) / len(found) < INT8_KL


def test_a_decode_hit(client: Client) -> None:
    """A conversation goes on from the state that decoding left behind; from the start it gives the same, to rounding or int8."""
    found = []
    for seed in range(NUM_PROMPTS):
        text = list(held_out_text(PROMPT_TOKENS, seed=100 + seed))
        client.flush()
        first = client.generate(text[:WARM_TOKENS], DECODED)
        conversation = text[:WARM_TOKENS] + first["output_ids"] + text[WARM_TOKENS:]
        hit = client.generate(conversation, DECODED)
        client.flush()
        cold = client.generate(conversation, DECODED)
        assert cached_tokens(hit) >= WARM_TOKENS + DECODED - 1
        found += kl_while_alike(cold, hit)

    if client.codec == "none":
        assert max(found) < OTHER_STEPS_KL
    else:
        assert OTHER_STEPS_KL < sum(found) / len(found) < INT8_KL


def recalled(client: Client, *, cached: bool) -> tuple[int, int]:
    """Values told right, of those asked for; ``cached``: each question resumes from what the one before left."""
    right = total = 0
    for prompt in recall_prompts(NUM_RECALL_PROMPTS, seed=17):
        client.flush()
        said = prompt.prefix
        for key, value in prompt.queries:
            if not cached:
                client.flush()
            answer = client.generate(list(said + key), 1)
            assert (cached_tokens(answer) > 0) == (cached and said != prompt.prefix)
            right += answer["output_ids"] == list(value)
            total += 1
            said += key + value
    return right, total


def test_recall_is_as_good_from_the_cache(client: Client) -> None:
    """Recall does not suffer from a chain of hits: the difference lies within the interval of two such shares."""
    cached, total = recalled(client, cached=True)
    uncached, _ = recalled(client, cached=False)

    share = uncached / total
    interval = 1.96 * math.sqrt(2 * max(share * (1 - share), 1 / total) / total)
    assert share > 0.95
    assert cached == uncached or client.codec != "none"
    assert abs(cached - uncached) / total <= interval
