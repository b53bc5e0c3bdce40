"""A codec and a KV side that do nothing, for measuring what lies around them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from mamba_checkpoint_cache.state import StateSpec

TINY = StateSpec(num_layers=1, num_heads=1, d_v=1, d_k=1)
"""The smallest state there is."""


class NoCodec:
    """Stores nothing, and reports a finite state with a small error each time."""

    name = "stand-in"
    lossy = False

    def __init__(self) -> None:
        self._report = torch.tensor([1.0, 1e-4, 0.0], dtype=torch.float64)

    def bytes_per_slot(self, spec: StateSpec) -> int:
        """0."""
        return 0

    def allocate(self, spec: StateSpec, num_rows: int, device: torch.device) -> dict[str, Tensor]:
        """No tensors."""
        return {}

    def compress(
        self, source: Tensor, source_rows: Sequence[int], stored: dict[str, Tensor], stored_rows: Sequence[int]
    ) -> Tensor:
        """The report of one state, ``[1, num_layers, num_heads, 3]``."""
        return self._report.expand(1, source.shape[0], source.shape[2], 3)

    def restore(self, stored: dict[str, Tensor], stored_rows: Sequence[int], target: Tensor, target_rows: Sequence[int]) -> None:
        """Leave the target as it is."""


class NoKv:
    """Takes KV slots back and forgets them."""

    def free(self, ids: array[int]) -> None:
        """Nothing."""
