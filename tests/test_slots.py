from __future__ import annotations

import pytest

from mamba_checkpoint_cache import HandleError
from mamba_checkpoint_cache.slots import ActiveSlot, CheckpointSlot, SlotAllocator, SlotState


def test_slots_are_handed_out_from_one_up_and_never_the_padding_row():
    """Index 0 is the padding row; a pool of n gives n slots and then None."""
    slots = SlotAllocator("active", 3, ActiveSlot)

    handles = [slots.reserve() for _ in range(4)]

    assert [handle and handle.index for handle in handles] == [1, 2, 3, None]
    assert slots.counts == (0, 3, 0, 0)


def test_counts_follow_each_move_and_add_up():
    """Every slot is in exactly one state."""
    slots = SlotAllocator("active", 2, ActiveSlot)
    slot = slots.reserve()

    for state, counts in (
        (SlotState.LOCKED, (1, 0, 0, 1)),
        (SlotState.EVICTABLE, (1, 0, 1, 0)),
        (SlotState.RESERVED, (1, 1, 0, 0)),
    ):
        slots.move(slot, state)
        assert slots.counts == counts
        slots.check()


def test_a_freed_handle_is_refused_by_its_generation():
    """The same index comes back with another generation, and the old handle cannot touch it."""
    slots = SlotAllocator("active", 1, ActiveSlot)
    old = slots.reserve()
    slots.free(old)
    new = slots.reserve()

    assert new.index == old.index
    for use in (slots.free, slots.state, lambda slot: slots.move(slot, SlotState.LOCKED)):
        with pytest.raises(HandleError, match="freed already"):
            use(old)
    assert slots.state(new) is SlotState.RESERVED


@pytest.mark.parametrize(
    "foreign", [SlotAllocator("active", 1, ActiveSlot).reserve(), SlotAllocator("c", 1, CheckpointSlot).reserve(), 1, None, -1]
)
def test_a_foreign_handle_is_refused(foreign):
    """Another pool's slot, a bare index or nothing at all is misuse."""
    slots = SlotAllocator("active", 1, ActiveSlot)
    slots.reserve()

    with pytest.raises(HandleError, match="expected a slot of this active pool"):
        slots.free(foreign)
    assert slots.counts == (0, 1, 0, 0)


def test_an_empty_pool_is_refused():
    """A pool without slots is a misconfiguration, told at construction."""
    with pytest.raises(ValueError, match="at least 1 slot, got 0"):
        SlotAllocator("active", 0, ActiveSlot)


def test_a_resized_pool_refuses_the_handles_of_before():
    """Fewer slots, then more again: each handle ever given stays stale, also where its row was gone in between."""
    slots = SlotAllocator("checkpoint", 3, CheckpointSlot)
    old = [slots.reserve() for _ in range(3)]
    for slot in old:
        slots.free(slot)

    for capacity in (1, 5):
        slots.resize(capacity)
        slots.check()
        assert slots.counts == (capacity, 0, 0, 0)
        handles = [slots.reserve() for _ in range(capacity + 1)]
        assert [handle and handle.index for handle in handles] == [*range(1, capacity + 1), None]
        for stale in old:
            with pytest.raises(HandleError, match="freed already"):
                slots.state(stale)
        for slot in handles[:-1]:
            slots.free(slot)
        old += handles[:-1]


def test_a_pool_in_use_is_not_resized():
    """Whatever state the slot is in, and nothing changes; nor is a pool of no slots made."""
    slots = SlotAllocator("checkpoint", 2, CheckpointSlot)
    slot = slots.reserve()
    for state in (SlotState.RESERVED, SlotState.EVICTABLE, SlotState.LOCKED):
        slots.move(slot, state)
        with pytest.raises(HandleError, match="can't be resized while slots are in use"):
            slots.resize(1)
        assert slots.state(slot) is state
    slots.free(slot)

    with pytest.raises(ValueError, match="needs at least 1 slot, got 0"):
        slots.resize(0)
    assert slots.capacity == 2
    slots.check()
