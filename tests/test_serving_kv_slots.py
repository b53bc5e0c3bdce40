"""The allocator of KV slots."""

from __future__ import annotations

from array import array

import pytest

from mamba_checkpoint_cache import HandleError
from mamba_checkpoint_cache.serving.kv_slots import KvSlots


def test_every_slot_is_handed_out_once() -> None:
    """All slots but 0 can be had, none twice, and more than are free are refused whole."""
    slots = KvSlots(5)

    first, too_many, rest = slots.allocate(3), slots.allocate(3), slots.allocate(2)

    assert too_many is None
    assert sorted([*first, *rest]) == [1, 2, 3, 4, 5]
    assert slots.num_free == 0
    assert slots.allocate(0) == array("i")


def test_freed_slots_come_back() -> None:
    """What was freed is handed out again."""
    slots = KvSlots(4)
    ids = slots.allocate(4)

    slots.free(ids[1:3])

    assert sorted(slots.allocate(2)) == sorted(ids[1:3])


@pytest.mark.parametrize("bad", [[2, 2], [0], [6], [-1], [3]])
def test_a_slot_that_is_not_in_use_is_refused(bad: list[int]) -> None:
    """A double free, the padding slot, a foreign id and a free slot raise and say which it was."""
    slots = KvSlots(5)
    while slots.num_free > 1:
        slots.allocate(1)
    (free,) = {1, 2, 3, 4, 5} - {i for i in range(1, 6) if slots._in_use[i]}
    ids = [free] if bad == [3] else bad

    with pytest.raises(HandleError, match=f"KV slot {ids[-1]} is not in use"):
        slots.free(array("i", ids))
