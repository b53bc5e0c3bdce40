"""Random traffic on a cache, written down: what two caches that differ in their telemetry alone must have in common."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from engine_side import SPEC, Request, content
from hypothesis import strategies as st

from mamba_checkpoint_cache import ActivePool, CheckpointPool, DriftGuard, LogitComparison, PrefixCache, Telemetry
from mamba_checkpoint_cache.codec.reference import Int8Codec


@dataclass(frozen=True)
class Turn:
    """A prompt that is run and committed at its cuts; what is done with the request then; what is done with the cache."""

    tokens: tuple[int, ...]
    cuts: tuple[int, ...]
    poisoned: bool
    end: str
    after: str


TURNS = st.lists(
    st.builds(
        Turn,
        tokens=st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple),
        cuts=st.lists(st.integers(1, 12), max_size=3, unique=True).map(lambda cuts: tuple(sorted(cuts))),
        poisoned=st.sampled_from([False, False, False, True]),
        end=st.sampled_from(["finish", "finish", "donate", "hold"]),
        after=st.sampled_from(["nothing", "nothing", "flush", "check", "misuse"]),
    ),
    min_size=1,
    max_size=12,
)


def build(telemetry: Telemetry | None, guard: DriftGuard | None = None) -> PrefixCache:
    """A cache of three checkpoints and four running requests."""
    checkpoints = CheckpointPool(SPEC, 3, codec=Int8Codec())
    return PrefixCache(active=ActivePool(SPEC, 4), checkpoints=checkpoints, telemetry=telemetry, guard=guard)


def play(cache: PrefixCache, turns: list[Turn]) -> list[Any]:
    """Every result that the cache gave, and the states it restored and holds in the end."""
    seen: list[Any] = []
    held: list[Request] = []
    for turn in turns:
        if len(held) == 3:
            held.pop(0).finish()
        request = Request(cache, list(turn.tokens))
        seen.append((request.match.depth, request.match.matched, request.match.miss, content(cache, request.slot)))
        cuts = [cut for cut in turn.cuts if request.match.depth < cut <= len(turn.tokens)]
        seen += [request.commit(cut, math.nan if turn.poisoned else float(cut)) for cut in cuts]
        if turn.end == "donate" and request.match.depth < len(turn.tokens):
            seen.append(request.commit(len(turn.tokens), 1.0, donate=True))
            request.finish(donated=True)
        elif turn.end == "hold":
            held.append(request)
        else:
            request.finish()
        seen.append(_after(cache, turn))
    for request in held:
        request.finish()
    cache.check()
    return [*seen, *map(_bytes, [cache.active.state, *cache.checkpoints.stored.values()])]


def _after(cache: PrefixCache, turn: Turn) -> Any:
    if turn.after == "flush":
        return cache.flush()
    if turn.after == "check":
        return cache.record_check(LogitComparison((0.25,), (False,)))
    if turn.after == "misuse":
        try:
            cache.match_prefix(["not a token"])  # type: ignore[list-item]
        except ValueError as error:
            return str(error)
    return None


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
