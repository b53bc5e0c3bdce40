"""The engine in tests: KV slots of its own, states that can be told apart, and a request that walks through the calls."""

from __future__ import annotations

from array import array

import torch

from mamba_checkpoint_cache import ActivePool, CheckpointPool, Match, PrefixCache, SideSpec, StateSpec
from mamba_checkpoint_cache.codec.base import ERROR_ENERGY, SIGNAL_ENERGY
from mamba_checkpoint_cache.codec.reference import Int8Codec, NoneCodec
from mamba_checkpoint_cache.slots import ActiveSlot, CheckpointSlot

SPEC = StateSpec(num_layers=2, num_heads=2, d_v=4, d_k=3, side=(SideSpec("conv", (5, 3)),))
CODECS = {"none": NoneCodec, "int8": Int8Codec}


class FadingCodec(Int8Codec):
    """int8 that, while ``faded``, loses a fifth of every element: a relative error of 0.2."""

    faded = False

    def _encode(self, state: torch.Tensor, row: dict[str, torch.Tensor]) -> torch.Tensor:
        report = super()._encode(state, row)
        if self.faded:
            row["scale"].mul_(0.8)
            report[:, ERROR_ENERGY] = 0.04 * report[:, SIGNAL_ENERGY]
        return report


class KvSlots:
    """A KV allocator that refuses to take back what it did not give out."""

    def __init__(self, size: int = 1000) -> None:
        self.size = size
        self.free_ids = set(range(1, size + 1))

    def take(self, count: int) -> array[int]:
        ids = sorted(self.free_ids)[:count]
        self.free_ids -= set(ids)
        return array("i", ids)

    def free(self, ids: array[int]) -> None:
        assert len(set(ids)) == len(ids), f"ids given back twice in one call: {ids}"
        assert not self.free_ids & set(ids), f"ids given back that are free already: {self.free_ids & set(ids)}"
        self.free_ids |= set(ids)


def make_cache(*, active=4, slots=4, codec="none", spec=SPEC, kv=None, pool=CheckpointPool, **options) -> PrefixCache:
    checkpoints = pool(spec, slots, codec=CODECS[codec]() if isinstance(codec, str) else codec)
    return PrefixCache(active=ActivePool(spec, active), checkpoints=checkpoints, kv=kv, **options)


def fill(cache: PrefixCache, slot: ActiveSlot | CheckpointSlot, content: float) -> None:
    """Write a state that is recognised by ``content``."""
    cache.active.state[:, slot.index] = content
    for tensor in cache.active.side.values():
        tensor[:, slot.index] = content


def content(cache: PrefixCache, slot: ActiveSlot) -> float:
    """The content of a slot; NaN if its parts disagree."""
    parts = [cache.active.state[:, slot.index], *(side[:, slot.index] for side in cache.active.side.values())]
    values = torch.cat([part.float().flatten() for part in parts]).unique()
    return float(values[0]) if len(values) == 1 else float("nan")


class Request:
    """One request: matched and restored on construction, then committed as a test pleases."""

    def __init__(self, cache: PrefixCache, tokens: list[int], kv: KvSlots | None = None) -> None:
        self.cache, self.tokens, self.kv = cache, tokens, kv
        self.match: Match = cache.match_prefix(tokens)
        slot = cache.active.allocate()
        assert slot is not None
        self.slot = slot
        cache.restore(self.match, slot)
        self.ids = array("i", self.match.kv)
        self.owned = self.match.depth
        if kv is not None:
            self.ids.extend(kv.take(len(tokens) - self.match.depth))

    def commit(self, depth: int, value: float | None = None, *, lease: bool = True, **options):
        """Run up to ``depth``, leaving ``value`` as the state, and commit."""
        if value is not None:
            fill(self.cache, self.slot, value)
        self.cache.active.advance(self.slot, depth=depth)
        result = self.cache.commit(
            self.tokens,
            depth=depth,
            source=self.slot,
            kv=self.ids[:depth] if self.kv else None,
            lease=self.match if lease else None,
            **options,
        )
        if self.kv:
            self.ids[: len(result.kv)] = result.kv
            self.owned = max(self.owned, len(result.kv))
        return result

    def finish(self, *, donated: bool = False) -> None:
        """Release the lease, the slot and the KV that the tree did not take."""
        self.cache.release(self.match)
        if not donated:
            self.cache.active.free(self.slot)
        if self.kv:
            self.kv.free(self.ids[self.owned :])
        self.cache.check()


def serve(cache: PrefixCache, tokens: list[int], *cuts: int, kv: KvSlots | None = None, value: float = 1.0) -> Match:
    """A whole request that commits at each of ``cuts``; the state at depth d is ``value * d``."""
    request = Request(cache, tokens, kv)
    for cut in cuts:
        if cut > request.match.depth:
            request.commit(cut, value * cut)
    request.finish()
    return request.match
