"""The Codec protocol, and what a codec reports about each state it compresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, device

from mamba_checkpoint_cache.state import StateSpec

SIGNAL_ENERGY, ERROR_ENERGY, NON_FINITE = 0, 1, 2
"""Positions in the last axis of a report."""


class Codec(Protocol):
    """Recurrent states to compressed bytes and back, for any number of slots in one launch.

    States are read and written where they lie: ``[num_layers, rows, num_heads, d_v, d_k]`` with any strides, gathered by
    row (a row is a slot index; the caller owns which). Compressed tensors are ``[num_layers, rows, …]`` and contiguous.
    """

    name: str
    lossy: bool

    def bytes_per_slot(self, spec: StateSpec) -> int:
        """Bytes that the compressed recurrent state of one slot takes, side state not counted."""
        ...

    def allocate(self, spec: StateSpec, num_rows: int, device: device) -> dict[str, Tensor]:
        """The compressed tensors for ``num_rows`` rows, zeroed, by name."""
        ...

    def compress(
        self, source: Tensor, source_rows: Sequence[int], stored: dict[str, Tensor], stored_rows: Sequence[int]
    ) -> Tensor:
        """Compress ``source[:, source_rows[i]]`` into ``stored[…][:, stored_rows[i]]``, in stream order.

        Returns the report ``[len(source_rows), num_layers, num_heads, 3]``, float64, on the device of ``source``: the sum of
        squares of the elements, the sum of squared differences between them and what a restore will give, and the number of
        elements that are NaN or infinite, which count as 0 in those sums. It comes from the same pass as the compression.
        """
        ...

    def restore(self, stored: dict[str, Tensor], stored_rows: Sequence[int], target: Tensor, target_rows: Sequence[int]) -> None:
        """Decompress ``stored[…][:, stored_rows[i]]`` into ``target[:, target_rows[i]]``, in stream order."""
        ...
