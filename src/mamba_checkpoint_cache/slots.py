"""Typed slot handles, and who owns each slot of a pool."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Generic, NamedTuple, TypeVar

from mamba_checkpoint_cache.errors import HandleError, InvariantError


class SlotState(IntEnum):
    """Where a slot stands. A slot is in exactly one state at any time."""

    FREE = 0
    RESERVED = 1
    """Handed out, content not defined yet (or not verified yet)."""
    EVICTABLE = 2
    """Holds content that nobody is using."""
    LOCKED = 3
    """Holds content that somebody is using."""


class SlotCounts(NamedTuple):
    """How many slots are in each state, in the order of :class:`SlotState`. They add up to the capacity."""

    free: int
    reserved: int
    evictable: int
    locked: int


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A handle of one slot of one pool, good until that slot is freed.

    ``index`` is the row in the pool's tensors, counted from 1: row 0 is padding and never handed out.
    """

    pool: str
    index: int
    generation: int
    owner: object = field(repr=False)


class ActiveSlot(Slot):
    """A slot of the active pool: one running request's recurrent state, in its native dtype."""

    __slots__ = ()


class CheckpointSlot(Slot):
    """A slot of the checkpoint pool: one compressed state."""

    __slots__ = ()


S = TypeVar("S", bound=Slot)


class SlotAllocator(Generic[S]):
    """Hands out the slots ``1 … capacity`` and keeps the state of each.

    One thread moves slots; ``counts`` may be read from any thread, since it is replaced whole at each move.
    """

    def __init__(self, pool: str, capacity: int, handle: type[S]) -> None:
        self.pool = pool
        self._require(capacity)
        self.capacity = capacity
        self.counts = SlotCounts(capacity, 0, 0, 0)
        self._handle = handle
        self._free = deque(range(1, capacity + 1))
        self._states = [SlotState.FREE] * (capacity + 1)
        self._generations = [0] * (capacity + 1)

    def reserve(self) -> S | None:
        """A free slot, now reserved; None if no slot is free."""
        if not self._free:
            return None
        index = self._free.popleft()
        self._set(index, SlotState.RESERVED)
        return self._handle(self.pool, index, self._generations[index], self)

    def state(self, slot: S) -> SlotState:
        """The state of a live slot. Raises :class:`HandleError` if the handle is stale or another pool's."""
        if not isinstance(slot, self._handle) or slot.owner is not self:
            raise HandleError(f"expected a slot of this {self.pool} pool, got {slot!r}: pass the handle that it gave you")
        if slot.generation != self._generations[slot.index]:
            now = self._generations[slot.index]
            raise HandleError(f"{slot!r} was freed already (the slot is at generation {now}): drop a handle when you free it")
        return self._states[slot.index]

    def move(self, slot: S, state: SlotState) -> None:
        """Put a live slot into another state than free."""
        self.state(slot)
        self._set(slot.index, state)

    def free(self, slot: S) -> None:
        """Give a slot back; its handle is stale from here on."""
        self.state(slot)
        self._set(slot.index, SlotState.FREE)
        self._generations[slot.index] += 1
        self._free.append(slot.index)

    def resize(self, capacity: int) -> None:
        """Hand out the slots ``1 … capacity`` from here on. Handles of before stay stale.

        Raises:
            HandleError: if a slot is in use.
            ValueError: if ``capacity`` is under 1.
        """
        if self.counts.free != self.capacity:
            raise HandleError(f"the {self.pool} pool can't be resized while slots are in use: {self.counts}")
        self._require(capacity)
        self.capacity = capacity
        self._free = deque(range(1, capacity + 1))
        self._states = [SlotState.FREE] * (capacity + 1)
        self._generations += [0] * (capacity + 1 - len(self._generations))
        self.counts = SlotCounts(capacity, 0, 0, 0)

    def check(self) -> None:
        """Raise :class:`InvariantError` unless states, counts and the free list agree."""
        found = SlotCounts(*(self._states[1:].count(state) for state in SlotState))
        if found != self.counts or sum(found) != self.capacity:
            raise InvariantError(f"{self.pool} pool of {self.capacity}: counted {found}, recorded {self.counts}")
        if sorted(self._free) != [i for i in range(1, self.capacity + 1) if self._states[i] is SlotState.FREE]:
            raise InvariantError(f"{self.pool} pool: the free list {sorted(self._free)} is not the list of free slots")

    def _require(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"the {self.pool} pool needs at least 1 slot, got {capacity}")

    def _set(self, index: int, state: SlotState) -> None:
        counts = list(self.counts)
        counts[self._states[index]] -= 1
        counts[state] += 1
        self._states[index] = state
        self.counts = SlotCounts(*counts)
