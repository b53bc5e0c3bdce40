"""Which KV slots are free."""

from __future__ import annotations

from array import array

from mamba_checkpoint_cache.errors import HandleError


class KvSlots:
    """Hands out the KV slots ``1 … capacity``, one per token; slot 0 is padding. The tree gives back here what it evicts."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = array("i", range(capacity, 0, -1))
        self._in_use = bytearray(capacity + 1)

    @property
    def num_free(self) -> int:
        """Slots that nobody has."""
        return len(self._free)

    def allocate(self, count: int) -> array[int] | None:
        """``count`` slots, or None if fewer are free."""
        if count > len(self._free):
            return None
        split = len(self._free) - count
        ids = self._free[split:]
        del self._free[split:]
        for i in ids:
            self._in_use[i] = 1
        return ids

    def free(self, ids: array[int]) -> None:
        """Take slots back. Raises :class:`HandleError` if one of them is not in use."""
        for i in ids:
            if not 1 <= i <= self.capacity or not self._in_use[i]:
                raise HandleError(f"KV slot {i} is not in use: it was freed already, or never allocated")
            self._in_use[i] = 0
        self._free.extend(ids)
