"""The ways in which a state at a depth is come by: restored once, restored again and again, or computed in other chunks."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mamba_checkpoint_cache.codec import Codec
from mamba_checkpoint_cache.errors import HandleError
from mamba_checkpoint_cache.evaluation.prompts import Prompt
from mamba_checkpoint_cache.integrations.transformers import HybridModel, Session
from mamba_checkpoint_cache.pools import ActivePool, CheckpointPool
from mamba_checkpoint_cache.slots import ActiveSlot

RECHUNK = 48
"""Tokens of a chunk in which a prefix is computed again: not a size that kernels are built for, so that rounding differs."""


class ArmKey(NamedTuple):
    """A codec's name (or that of another way to a state), and whether the state is stored and restored before each step."""

    name: str
    again: bool = False


RECHUNKED = ArmKey("rechunked")


class Place:
    """A model, active slots, and KV slots for two sequences of ``longest`` tokens: one to keep, one to write over."""

    def __init__(self, model: HybridModel, *, slots: int, longest: int) -> None:
        self.model = model
        self.active = model.active_pool(slots)
        self.kv = model.kv_store(2 * longest)
        self._longest = longest

    def slot(self) -> ActiveSlot:
        """An active slot, kept for good."""
        slot = self.active.allocate()
        if slot is None:
            raise HandleError(f"expected at most {self.active.slots.capacity} slots to be asked for")
        return slot

    def begin(self, slot: ActiveSlot) -> Session:
        """A session of an empty sequence."""
        return self.model.start(self.active, slot.index, kv=self.kv)

    def go_on(self, slot: ActiveSlot, depth: int) -> Session:
        """A session from the state in ``slot``, and the KV that was kept, of ``depth`` tokens."""
        return self.model.start(self.active, slot.index, kv=self.kv, kv_ids=self.kept(0, depth), depth=depth)

    def kept(self, begin: int, end: int) -> range:
        """KV slots of the tokens ``begin`` to ``end`` that :meth:`go_on` reads."""
        return range(begin + 1, end + 1)

    def passing(self, begin: int, end: int) -> range:
        """KV slots of the tokens ``begin`` to ``end`` for sessions that are never gone on from: they share them."""
        return range(self._longest + begin + 1, self._longest + end + 1)


class Checkpoint:
    """Room for one checkpoint in a CheckpointPool of its own."""

    def __init__(self, model: HybridModel, codec: Codec) -> None:
        self.pool = CheckpointPool(model.spec, 1, codec=codec, device=model.device)
        slot = self.pool.slots.reserve()
        if slot is None:
            raise HandleError("expected a new pool to have a free slot")
        self._slot = slot

    def pass_through(self, active: ActivePool, source: ActiveSlot, target: ActiveSlot) -> None:
        """Store the state in ``source`` and restore it to ``target``, which may be the same."""
        self.pool.compress(active, source, self._slot)
        self.pool.restore(self._slot, active, target)


class Arm(Protocol):
    """A session that goes on from a state, come by in one way or another."""

    key: ArmKey
    slot: ActiveSlot

    def start(self, prompt: Prompt, exact: ActiveSlot) -> Session:
        """A session after the prompt's prefix, of which ``exact`` has the state and the kept KV slots the KV."""
        ...

    def restore_again(self) -> bool:
        """Restore the running session's state, if this arm does so between steps; says whether it did."""
        ...


class RestoredArm:
    """Goes on from what a codec's store and restore make of the exact state."""

    def __init__(self, place: Place, codec: Codec, *, again: bool) -> None:
        self.key = ArmKey(codec.name, again)
        self.slot = place.slot()
        self._place = place
        self._checkpoint = Checkpoint(place.model, codec)

    def start(self, prompt: Prompt, exact: ActiveSlot) -> Session:
        """A session from the restored state; conv windows and KV are the exact ones."""
        self._checkpoint.pass_through(self._place.active, exact, self.slot)
        return self._place.go_on(self.slot, prompt.depth)

    def restore_again(self) -> bool:
        """One more hop, in place, unless this arm is restored only once."""
        if self.key.again:
            self._checkpoint.pass_through(self._place.active, self.slot, self.slot)
        return self.key.again


class RechunkedArm:
    """Computes the prefix again, in other chunks: what differs is rounding."""

    key = RECHUNKED

    def __init__(self, place: Place) -> None:
        self.slot = place.slot()
        self._place = place

    def start(self, prompt: Prompt, exact: ActiveSlot) -> Session:
        """A session that ran the prefix itself."""
        session = self._place.begin(self.slot)
        for begin in range(0, prompt.depth, RECHUNK):
            end = min(begin + RECHUNK, prompt.depth)
            session.run(prompt.tokens[begin:end], self._place.passing(begin, end))
        return session

    def restore_again(self) -> bool:
        """Never."""
        return False


def state_energies(active: ActivePool, exact: ActiveSlot, other: ActiveSlot) -> Tensor:
    """Float64 ``[layers, heads, 2]`` on the host: the energy of the state in ``exact``, and of its difference to ``other``."""
    layers = [
        torch.stack([state[exact.index].double(), state[exact.index].double() - state[other.index].double()])
        for state in active.state
    ]
    return torch.stack([pair.square().sum((-2, -1)).T for pair in layers]).cpu()
