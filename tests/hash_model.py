"""A "model" for tests of the engine that is cheap and can't be fooled; imports no transformers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mamba_checkpoint_cache import ActivePool, SideSpec, StateSpec
from mamba_checkpoint_cache.codec.reference import NoneCodec
from mamba_checkpoint_cache.integrations.continuation import ANY_STEPS
from mamba_checkpoint_cache.serving.config import EngineConfig
from mamba_checkpoint_cache.serving.engine import Engine
from mamba_checkpoint_cache.serving.sampling import Sampling
from mamba_checkpoint_cache.serving.tokens import ByteTokens

PRIME = 65521
VOCAB = ByteTokens.vocab_size


class HashModel:
    """A "model" whose state is a hash of all tokens so far, and whose KV of a token is that hash at that token.

    The next token depends on the state and on every KV slot of the sequence, all in exact integers: whatever is restored
    wrongly, kept too long or mixed up changes the output. What it must be can be computed without any cache: :func:`expected`.
    """

    def __init__(self, has_kv: bool = True) -> None:
        self.spec = StateSpec(1, 1, 2, 2, side=(SideSpec("conv", (1, 3), torch.float32),))
        self.device = torch.device("cpu")
        self.continuation = ANY_STEPS
        self.has_kv = has_kv
        self.fail_at: int | None = None
        self.steps: list[tuple[int, int]] = []

    def active_pool(self, slots: int) -> ActivePool:
        return ActivePool(self.spec, slots)

    def kv_store(self, slots: int) -> Tensor | None:
        return torch.full((slots + 1,), -1) if self.has_kv else None

    def start(
        self, active: ActivePool, row: int, *, kv: Tensor | None = None, kv_ids: Sequence[int] = (), depth: int = 0
    ) -> HashSession:
        return HashSession(self, active, row, kv, list(kv_ids), depth)


class HashSession:
    def __init__(self, model: HashModel, active: ActivePool, row: int, kv: Tensor | None, kv_ids: list[int], depth: int) -> None:
        assert len(kv_ids) == (depth if kv is not None else 0)
        self.model, self.kv, self.depth = model, kv, depth
        self.state, self.side = active.state[:, row], active.side["conv"][:, row]
        self.context = 0 if kv is None else int(kv[kv_ids].sum())

    def run(self, tokens: Sequence[int], kv_ids: Sequence[int] = ()) -> Tensor:
        self.model.steps.append((self.depth, self.depth + len(tokens)))
        assert len(kv_ids) == (len(tokens) if self.kv is not None else 0)
        assert torch.equal(self.state.flatten()[:1].expand(3), self.side.flatten()), "state and side state differ"
        value = int(self.state.flatten()[0])
        for index, token in enumerate(tokens):
            value = (31 * value + token + 1) % PRIME
            self.context += value
            if self.kv is not None:
                self.kv[kv_ids[index]] = value
        self.state.fill_(value)
        self.side.fill_(value)
        if self.model.fail_at is not None and self.depth < self.model.fail_at <= self.depth + len(tokens):
            raise ArithmeticError("the model failed")
        self.depth += len(tokens)
        return one_hot(value, self.context if self.kv is not None else 0)


def one_hot(value: int, context: int) -> Tensor:
    logits = torch.zeros(VOCAB)
    logits[(value * 7 + context) % 256] = 1.0
    return logits


def expected(prompt: Sequence[int], count: int, has_kv: bool = True) -> list[int]:
    """The output of a :class:`HashModel`, by its definition."""
    value = context = 0
    output: list[int] = []
    for position in range(len(prompt) + count):
        if position >= len(prompt):
            output.append(int(one_hot(value, context if has_kv else 0).argmax()))
        value = (31 * value + [*prompt, *output][position] + 1) % PRIME
        context += value
    return output


def hash_engine(model: HashModel | None = None, *, telemetry=None, **config) -> Engine:
    """An engine on a :class:`HashModel`, with chunks of 8 and exact checkpoints unless told otherwise."""
    defaults = {"active_slots": 3, "checkpoint_slots": 16, "codec": NoneCodec(), "chunk": 8, "max_context": 128, "kv_slots": 512}
    return Engine(model or HashModel(), ByteTokens(), EngineConfig(**(defaults | config)), telemetry)


def greedy(count: int, **options) -> Sampling:
    """So many greedy tokens, end of text or not."""
    return Sampling(max_new_tokens=count, ignore_eos=True, **options)


def assert_clean(engine: Engine) -> None:
    """Nothing runs, and after a flush every slot of every pool is free."""
    assert engine.scheduler.idle
    engine.cache.check()
    engine.cache.flush()
    engine.cache.check()
    assert engine.cache.active.slots.counts.free == engine.config.active_slots
    assert engine.cache.checkpoints.slots.counts.free == engine.config.checkpoint_slots
    if engine.kv is not None:
        assert engine.kv.num_free == engine.kv.capacity
