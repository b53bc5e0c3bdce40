"""Match and insert against the number of cached prompts: what an engine's calls cost, less the compression itself."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from random import Random
from statistics import fmean, median
from typing import Any, NamedTuple, cast

import torch

from mamba_checkpoint_cache.bench.stand_in import TINY, NoCodec, NoKv
from mamba_checkpoint_cache.cache import PrefixCache
from mamba_checkpoint_cache.pools import ActivePool, CheckpointPool
from mamba_checkpoint_cache.serving.progress import Advance, progress
from mamba_checkpoint_cache.slots import ActiveSlot

SAMPLES = 500
"""Prompts timed at each size."""
VOCABULARY = 150_000
SYSTEM_TOKENS = range(100, 501, 16)
"""The lengths of the system prompts, of which there is one of each."""
TURNS = 4
TURN_TOKENS = (150, 350)
"""With these, the prompts of a session have 880 tokens on average."""
FORK_TURN = 2
"""The turn that starts over from somewhere inside the one before it."""
LIVE_SESSIONS = 16


class Prompt(NamedTuple):
    """A prompt, and how many of its tokens it took over from one before it."""

    tokens: array[int]
    inherited: int


def run(sizes: Sequence[int] = (1_000, 10_000, 100_000), *, samples: int = SAMPLES) -> dict[str, Any]:
    """Rows of ``prompts`` cached, ``tokens_per_prompt`` and ``reused_tokens`` (means), ``match_us`` and ``insert_us`` (medians).

    Match is ``PrefixCache.match_prefix`` of a list of ints just made, as a tokenizer gives it. Insert is the whole
    ``PrefixCache.commit`` of such a prompt's end under the lease of a match: packing, tree, slot, and the reading of the codec's
    report; tokens and KV ids come as ``array("i")``, as the reference engine keeps them. The codec is a stand-in that touches
    no state; there is no telemetry, and a slot for everyone.

    What is timed are new turns after prompts drawn evenly from all that are cached, first every match, then every insert.
    """
    with progress("prompts", sum(sizes)) as advance:
        return {"rows": [_row(size, samples, advance) for size in sizes]}


def _row(size: int, samples: int, advance: Advance) -> dict[str, Any]:
    bench, random = _Bench(size + samples), Random(size)  # noqa: S311 - prompts, not secrets
    drawn = set(random.sample(range(size), min(samples, size)))
    turns = []
    for place, prompt in enumerate(islice(generate_prompts(random), size)):
        bench.insert(prompt.tokens)
        if place in drawn:
            turns.append(prompt.tokens[: prompt.inherited] + _tokens(TURN_TOKENS, random))
        advance(1)
    matches = [bench.match(tokens.tolist()) for tokens in turns]
    return {
        "prompts": size,
        "tokens_per_prompt": round(fmean(map(len, turns))),
        "reused_tokens": round(fmean(reused for reused, _ in matches)),
        "match_us": median(microseconds for _, microseconds in matches),
        "insert_us": median(bench.insert(tokens) for tokens in turns),
    }


def generate_prompts(random: Random) -> Iterator[Prompt]:
    """Prompts without end, of sessions that take turns in random order and share system prompts."""
    systems = [_tokens((length, length), random) for length in SYSTEM_TOKENS]
    sessions: list[Iterator[Prompt]] = [iter(()) for _ in range(LIVE_SESSIONS)]
    while True:
        place = random.randrange(LIVE_SESSIONS)
        prompt = next(sessions[place], None)
        if prompt is None:
            sessions[place] = _session(random.choice(systems), random)
            prompt = next(sessions[place])
        yield prompt


def _session(tokens: array[int], random: Random) -> Iterator[Prompt]:
    for turn in range(TURNS):
        dropped = random.randrange(1, TURN_TOKENS[0]) if turn == FORK_TURN else 0
        inherited = len(tokens) - dropped
        tokens = tokens[:inherited] + _tokens(TURN_TOKENS, random)
        yield Prompt(tokens, inherited)


def _tokens(sizes: tuple[int, int], random: Random) -> array[int]:
    generator = torch.Generator().manual_seed(random.getrandbits(32))
    return array("i", torch.randint(VOCABULARY, (random.randint(*sizes),), generator=generator).tolist())


class _Bench:
    """A cache with a slot for each of ``capacity`` prompts, and an engine with one slot that runs them all."""

    def __init__(self, capacity: int) -> None:
        self._active = ActivePool(TINY, 1)
        checkpoints = CheckpointPool(TINY, capacity, codec=NoCodec())
        self._cache = PrefixCache(active=self._active, checkpoints=checkpoints, kv=NoKv())
        self._slot = cast(ActiveSlot, self._active.allocate())
        self._num_kv = 0

    def match(self, tokens: list[int]) -> tuple[int, float]:
        """The depth that matches, and the microseconds it took to find out."""
        started = time.perf_counter()
        match = self._cache.match_prefix(tokens)
        microseconds = 1e6 * (time.perf_counter() - started)
        self._cache.release(match)
        return match.depth, microseconds

    def insert(self, tokens: Sequence[int]) -> float:
        """Go through all calls of a request for ``tokens``; the microseconds of its commit."""
        match = self._cache.match_prefix(tokens)
        self._cache.restore(match, self._slot)
        self._active.advance(self._slot, depth=len(tokens))
        kv = match.kv + self._allocate_kv(len(tokens) - match.depth)
        started = time.perf_counter()
        self._cache.commit(tokens, depth=len(tokens), source=self._slot, kv=kv, lease=match)
        microseconds = 1e6 * (time.perf_counter() - started)
        self._cache.release(match)
        return microseconds

    def _allocate_kv(self, count: int) -> array[int]:
        first, self._num_kv = self._num_kv, self._num_kv + count
        return array("i", range(first, self._num_kv))
