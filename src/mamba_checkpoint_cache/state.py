"""What one recurrent state is made of: shapes, dtypes and exact byte counts."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch

STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class SideSpec:
    """One tensor that travels with the recurrent state exactly, in its own dtype: a conv window, say.

    ``shape`` is the shape of one layer of one slot, for example ``(channels, width)``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16

    @property
    def bytes_per_layer(self) -> int:
        """Bytes of one layer of one slot."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The recurrent state of one request: ``num_layers`` tensors of ``[num_heads, d_v, d_k]``, and its side state.

    ``d_k`` is the axis that the read-out sums over (``o = S q``); ``d_v`` is the axis that it keeps. A Mamba-1 state
    ``[d_inner, d_state]`` is described as heads of ``d_v`` channels each, so that ``num_heads * d_v == d_inner``.

    Raises:
        ValueError: if a size is not positive, the dtype is not one of float32, bfloat16 and float16, or two side
            tensors share a name.
    """

    num_layers: int
    num_heads: int
    d_v: int
    d_k: int
    dtype: torch.dtype = torch.float32
    side: tuple[SideSpec, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "d_v", "d_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"StateSpec.{name} must be at least 1, got {getattr(self, name)}")
        if self.dtype not in STATE_DTYPES:
            raise ValueError(f"StateSpec.dtype must be one of {STATE_DTYPES}, got {self.dtype}")
        names = [side.name for side in self.side]
        if len(set(names)) != len(names):
            raise ValueError(f"StateSpec.side must have distinct names, got {names}")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(num_layers, num_heads, d_v, d_k)``."""
        return (self.num_layers, self.num_heads, self.d_v, self.d_k)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent state of one slot in its native dtype, side state not counted."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def side_bytes(self) -> int:
        """Bytes of the side state of one slot, all layers."""
        return self.num_layers * sum(side.bytes_per_layer for side in self.side)

    @property
    def native_bytes(self) -> int:
        """Bytes of one slot of the active pool: state and side state, uncompressed."""
        return self.state_bytes + self.side_bytes

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits that differ whenever two specs' slots are not interchangeable."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]
