"""Whether a model continues from a cached state as if it had never stopped: measured at start-up, never assumed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mamba_checkpoint_cache.integrations.continuation import ANY_STEPS, Continuation, Deviation, Mode
from mamba_checkpoint_cache.integrations.layout import UnsupportedModelError
from mamba_checkpoint_cache.integrations.transformers import HybridModel, KvStore

TOLERANCE = 2.0
"""Deviations up to this many times the model's own rounding noise count as exact."""
MAX_TOKEN_DEVIATION = 1e-2
"""Above this, lone tokens that deviate are a reason to refuse a model that continues exactly in chunks."""

Steps = tuple[int, ...]

_LONGEST_CHUNK = 256
_LONE_TOKENS = 16


def prepare_model(model: PreTrainedModel) -> HybridModel:
    """``model``, ready to be served from an ActivePool in the steps that :func:`probe_continuation` allows.

    Raises:
        UnsupportedModelError: if its state can't be kept in slots, or it can't be continued from one.
    """
    hybrid = HybridModel(model)
    hybrid.continuation = probe_continuation(hybrid)
    if hybrid.continuation.mode is Mode.REFUSED:
        raise UnsupportedModelError(hybrid.continuation.message)
    return hybrid


def probe_continuation(model: HybridModel, *, seed: int = 0) -> Continuation:
    """Compare one pass over random prompts with continuing them in chunks and token by token, in a pool of its own.

    Takes some dozen forward passes over at most 600 tokens. The bound for "exact" is the model's own rounding noise: how far its
    logits move when each linear layer's output is moved by up to one unit in its last place.
    """
    bench = _Bench(model, seed)
    chunk = _chunk_size(model)
    inner = min(chunk or 64, _LONGEST_CHUNK)
    length, middle = inner + 61, inner // 2 + 3
    prompts = [bench.prompt(length) for _ in range(2)]
    noise = max(bench.noise(prompt) for prompt in prompts)
    chunks = bench.deviation(prompts, [((1, 2, 7, 19), (length - 29,)), ((middle,), (2, length - middle - 2))])
    tokens = bench.deviation(prompts, [((1,), (1,) * _LONE_TOKENS), ((length - _LONE_TOKENS,), (1,) * _LONE_TOKENS)])
    multiple = 1
    if chunk and chunk <= _LONGEST_CHUNK and not _exact(chunks, noise):
        prompts = [bench.prompt(2 * chunk + 21) for _ in range(2)]
        aligned = bench.deviation(prompts, [((chunk,), (chunk, 21)), ((2 * chunk,), (21,))])
        chunks, multiple = (aligned, chunk) if _exact(aligned, noise) else (chunks, 1)
    return _verdict(type(model.model).__name__, chunks, tokens, noise, multiple)


class _Prompt(NamedTuple):
    tokens: list[int]
    whole: Tensor
    """Logits of one pass over it."""


class _Bench:
    """Two slots of a model, to run trials in: the first is left full of NaN when the second goes on."""

    def __init__(self, model: HybridModel, seed: int) -> None:
        self.model = copy(model)
        self.model.continuation = ANY_STEPS
        self.pool = model.active_pool(2)
        self.kv: KvStore | None = None
        self._tensors = (self.pool.state, *self.pool.side.values())
        self.generator = torch.Generator().manual_seed(seed)

    def prompt(self, length: int) -> _Prompt:
        """Random tokens from the middle of the vocabulary, clear of most special ones."""
        vocabulary: int = self.model.model.get_input_embeddings().weight.shape[0]
        tokens: list[int] = torch.randint(vocabulary // 50, max(vocabulary // 2, 2), (length,), generator=self.generator).tolist()
        return _Prompt(tokens, self._run(tokens, (length,)))

    def noise(self, prompt: _Prompt) -> float:
        """How far rounding alone moves the logits."""
        with _rounding_noise(self.model.model, self.generator):
            return _relative(self._run(prompt.tokens, (len(prompt.tokens),)), prompt.whole)

    def deviation(self, prompts: Sequence[_Prompt], cuts: Sequence[tuple[Steps, Steps]]) -> Deviation:
        """The worst of one trial per prompt, in these steps before and after its state is copied."""
        found = [self._trial(prompt, before, after) for prompt, (before, after) in zip(prompts, cuts, strict=True)]
        return Deviation(
            relative=max(d.relative for d in found),
            largest=max(d.largest for d in found),
            effect=min(d.effect for d in found),
            bitwise=all(d.bitwise for d in found),
        )

    def _trial(self, prompt: _Prompt, before: Steps, after: Steps) -> Deviation:
        cut = sum(before)
        head = self._run(prompt.tokens, before)
        held = [tensor[:, 1].clone() for tensor in self._tensors]
        tail = self._run(prompt.tokens, after, cut)
        for tensor in self._tensors:
            tensor[:, 1] = torch.nan
        copied = self._resume(prompt, after, cut, held)
        wiped = [self._resume(prompt, after, cut, _without(held, index)) for index in range(len(held))]
        runs = [torch.cat([head, rest]) for rest in (tail, copied)]
        expected = prompt.whole[: len(runs[0])]
        return Deviation(
            relative=max(_relative(run, expected) for run in runs),
            largest=max((run.float() - expected.float()).abs().max().item() for run in runs),
            effect=min(_relative(without, copied, share=1.0) for without in wiped),
            bitwise=torch.equal(tail, copied),
        )

    def _resume(self, prompt: _Prompt, after: Steps, cut: int, held: Sequence[Tensor]) -> Tensor:
        for tensor, content in zip(self._tensors, held, strict=True):
            tensor[:, 2] = content
        return self._run(prompt.tokens, after, cut, row=2)

    def _run(self, tokens: list[int], steps: Steps, depth: int = 0, row: int = 1) -> Tensor:
        if depth == 0:
            self.kv = self.model.kv_store(len(tokens))
        session = self.model.start(self.pool, row, kv=self.kv, kv_ids=range(1, depth + 1), depth=depth)
        logits = []
        for count in steps:
            begin, end = session.depth, session.depth + count
            logits.append(session.run(tokens[begin:end], range(begin + 1, end + 1), every=True))
        return torch.cat(logits)


@contextmanager
def _rounding_noise(model: PreTrainedModel, generator: torch.Generator) -> Iterator[None]:
    """Moves the output of every embedding and linear layer by up to one unit in the last place."""

    def shake(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        offset = torch.rand(output.shape, generator=generator).to(output.device) * 2 - 1
        return (output.float() * (1 + torch.finfo(output.dtype).eps * offset)).to(output.dtype)

    handles = [m.register_forward_hook(shake) for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _relative(logits: Tensor, expected: Tensor, share: float = 0.75) -> float:
    """The deviation that this share of positions stays under: a router that tips over at a few of them says nothing."""
    logits, expected = logits.double(), expected.double()
    spread = expected - expected.mean(-1, keepdim=True)
    ratios = (logits - expected).norm(dim=-1) / spread.norm(dim=-1)
    return float(ratios.nan_to_num(nan=torch.inf).quantile(share, interpolation="higher"))


def _without(held: Sequence[Tensor], index: int) -> list[Tensor]:
    return [torch.zeros_like(tensor) if i == index else tensor for i, tensor in enumerate(held)]


def _chunk_size(model: HybridModel) -> int | None:
    config = model.model.config.get_text_config(decoder=True)
    return getattr(config, "chunk_size", None) or getattr(config, "mamba_chunk_size", None)


def _exact(measured: Deviation, noise: float) -> bool:
    return measured.relative <= min(TOLERANCE * noise, 1.0) and measured.effect > 0


def _verdict(name: str, chunks: Deviation, tokens: Deviation, noise: float, multiple: int) -> Continuation:
    by_chunks, by_tokens = _exact(chunks, noise), _exact(tokens, noise)
    tolerable = by_tokens or (tokens.effect > 0 and tokens.relative <= MAX_TOKEN_DEVIATION)
    if by_chunks and tolerable:
        mode = Mode.CHUNKS
        start = "any depth" if multiple == 1 else f"multiples of {multiple} tokens"
        message = f"{name} continues exactly in chunks from {start}"
        message += "" if by_tokens else f", but lone tokens are {_off(tokens)}"
    elif by_tokens:
        mode = Mode.TOKENS
        message = f"{name} is continued token by token, which is exact but slow: chunks are {_off(chunks)}"
    else:
        mode = Mode.REFUSED
        message = f"{name} can't be continued from a cached state: chunks are {_off(chunks)}, lone tokens {_off(tokens)}"
    trusted = tokens if mode is Mode.TOKENS else chunks
    if mode is not Mode.REFUSED and trusted.effect < TOLERANCE * noise:
        message += "; rounding drowns the state's effect on these logits, so this is weak evidence"
    return Continuation(mode, multiple, noise, chunks, tokens, f"{message} (rounding noise {noise:.1e})")


def _off(measured: Deviation) -> str:
    deaf = "" if measured.effect else ", as they ignore the recurrent state"
    return f"off by {measured.relative:.1e} of the logits' spread{deaf}"
