"""The arguments of one codec call, and everything that is demanded of them: checked once, for all formats and devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mamba_checkpoint_cache.state import STATE_DTYPES

Field = tuple[tuple[int, ...], torch.dtype]
"""The shape of one row of one layer of a compressed tensor, and its dtype."""


@dataclass(frozen=True, slots=True)
class Call:
    """Slot ``i`` is ``state[:, state_rows[i]]`` on one side and ``stored[…][:, stored_rows[i]]`` on the other."""

    state: Tensor
    state_rows: Sequence[int]
    stored: Mapping[str, Tensor]
    stored_rows: Sequence[int]

    @property
    def num_slots(self) -> int:
        """How many states are compressed or restored."""
        return len(self.state_rows)

    def check(self, fields: Mapping[str, Field], written_rows: Sequence[int]) -> None:
        """Raise ValueError unless both sides fit each other and ``fields``, every row exists, and none is written to twice."""
        if self.stored.keys() != fields.keys():
            raise ValueError(f"expected compressed tensors named {sorted(fields)}, got {sorted(self.stored)}")
        for name, field in fields.items():
            self._check_field(name, *field)
        if len(self.state_rows) != len(self.stored_rows):
            raise ValueError(f"expected as many state as stored rows, got {len(self.state_rows)} and {len(self.stored_rows)}")
        _check_rows("state", self.state_rows, self.state.shape[1])
        for tensor in self.stored.values():
            _check_rows("stored", self.stored_rows, tensor.shape[1])
        if len(set(written_rows)) != len(written_rows):
            raise ValueError(f"expected distinct rows to write to, got {list(written_rows)}")

    def _check_field(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        tensor, device = self.stored[name], self.state.device
        expected = (self.state.shape[0], *shape)
        fits = tensor.ndim == len(expected) + 1 and (tensor.shape[0], *tensor.shape[2:]) == expected
        if not (fits and tensor.dtype == dtype and tensor.device == device and tensor.is_contiguous()):
            wanted = f"contiguous {dtype} [{expected[0]}, rows, {', '.join(map(str, shape))}] on {device}"
            got = f"{tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
            raise ValueError(f"compressed tensor {name!r}: expected {wanted}, got {got}")


def check_state(state: Tensor) -> None:
    """Raise ValueError unless ``state`` is ``[num_layers, rows, num_heads, d_v, d_k]`` of a dtype that states may have."""
    if state.ndim != 5 or state.numel() == 0:
        raise ValueError(f"expected a state [num_layers, rows, num_heads, d_v, d_k] with no empty axis, got {list(state.shape)}")
    if state.dtype not in STATE_DTYPES:
        raise ValueError(f"expected a state dtype out of {STATE_DTYPES}, got {state.dtype}")


def _check_rows(kind: str, rows: Sequence[int], limit: int) -> None:
    if any(not 0 <= row < limit for row in rows):
        raise ValueError(f"expected {kind} rows in 0..{limit - 1}, got {list(rows)}")
