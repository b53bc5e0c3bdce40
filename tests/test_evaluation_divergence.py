"""How long greedy decoding stays the same, against two plain decodings."""

from __future__ import annotations

import random

import pytest
import torch
from tiny_models import VOCAB, probed

from mamba_checkpoint_cache.codec.reference import Int8Codec, NoneCodec
from mamba_checkpoint_cache.evaluation.divergence import GreedyDivergence
from mamba_checkpoint_cache.evaluation.noise import Bf16Codec
from mamba_checkpoint_cache.evaluation.prompts import Prompt
from mamba_checkpoint_cache.integrations.transformers import HybridModel

MAX_TOKENS = 24


class Coarse(Int8Codec):
    """A codec that is bad enough to change what is decoded."""

    name = "coarse"

    def _encode(self, state, row):
        super()._encode(state, row)
        row["q"].copy_((row["q"] / 40).round() * 40)
        return torch.zeros(state.shape[0], 3)


def decoded(model: HybridModel, prompt: Prompt, *, coarse: bool) -> list[int]:
    """The tokens that greedy decoding gives, the state replaced at the prompt's depth by what the coarse codec makes of it."""
    active, kv = model.active_pool(1), model.kv_store(len(prompt.tokens) + MAX_TOKENS)
    session = model.start(active, 1, kv=kv)
    session.run(prompt.tokens[: prompt.depth], range(1, prompt.depth + 1))
    if coarse:
        codec = Coarse()
        stored = codec.allocate(model.spec, 1, torch.device("cpu"))
        codec.compress(active.state, (1,), stored, (0,))
        codec.restore(stored, (0,), active.state, (1,))
    tokens = [prompt.tokens[prompt.depth]]
    while len(tokens) <= MAX_TOKENS:
        tokens.append(int(session.run(tokens[-1:], [session.depth + 1]).argmax()))
    return tokens[1:]


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
def test_the_length_is_that_of_two_decodings(name: str) -> None:
    """For several prompts, tokens alike are the common beginning of what the exact and the coarse state decode to."""
    model = probed(name)
    divergence = GreedyDivergence(model, [NoneCodec(), Coarse()], longest=30, max_tokens=MAX_TOKENS)
    lengths = []
    for seed in range(4):
        prompt = Prompt("text", [random.Random(seed * 100 + i).randrange(3, VOCAB) for i in range(30)], 21)
        exact, coarse = decoded(model, prompt, coarse=False), decoded(model, prompt, coarse=True)
        expected = next((i for i in range(MAX_TOKENS) if exact[i] != coarse[i]), MAX_TOKENS)

        assert divergence.run(prompt) == {"none": MAX_TOKENS, "coarse": expected}
        lengths.append(expected)

    assert min(lengths) < MAX_TOKENS


def test_codecs_do_not_stand_in_each_other_s_way() -> None:
    """A codec's length is the same alone and beside others that diverge earlier."""
    model = probed("qwen3_5")
    prompt = Prompt("text", [random.Random(i).randrange(3, VOCAB) for i in range(30)], 21)
    codecs = [Coarse(), Int8Codec(), Bf16Codec()]

    together = GreedyDivergence(model, codecs, longest=30, max_tokens=MAX_TOKENS).run(prompt)

    for codec in codecs:
        alone = GreedyDivergence(model, [codec], longest=30, max_tokens=MAX_TOKENS).run(prompt)
        assert alone == {codec.name: together[codec.name]}
