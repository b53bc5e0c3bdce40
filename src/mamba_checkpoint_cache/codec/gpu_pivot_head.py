"""What the Triton kernels of the pivot formats are compiled for: how a head lies in memory, and its format's numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mamba_checkpoint_cache.codec.pivot import SCALE, Minifloat, block_of, packed_size

LANES = 32
"""Threads of a warp."""


@dataclass(frozen=True)
class Code:
    """A Minifloat, as far as the kernels need to know it."""

    shift: int
    base: int
    largest: int

    @staticmethod
    def of(minifloat: Minifloat) -> Code:
        """The same numbers."""
        return Code(23 - minifloat.mantissa_bits, minifloat.base, minifloat.largest)


SCALE_CODE = Code.of(SCALE)


@dataclass(frozen=True)
class Head:
    """What the compiler knows of a head and of the tile ``block_v`` by ``block_k`` that is worked on at a time."""

    d_v: int
    d_k: int
    stride_v: int
    stride_k: int
    block_v: int
    block_k: int
    levels: int
    limit: float
    pivot_bits: int
    gain: Code
    scale: Code = SCALE_CODE

    @property
    def rotated(self) -> int:
        """Rows that are rotated together."""
        return block_of(self.d_v)

    @property
    def lanes(self) -> int:
        """L of a tile."""
        return min(self.block_k, LANES)

    @property
    def is_one_tile(self) -> bool:
        """Whether a tile holds all of it."""
        return self.d_v <= self.block_v and self.d_k <= self.block_k

    @property
    def padded_v(self) -> int:
        """Rows rounded up to a power of two, and to whole bytes."""
        return max(8, 1 << (self.d_v - 1).bit_length())

    @property
    def gain_bits(self) -> int:
        """Bits of a gain, its sign among them."""
        return 1 + self.gain.largest.bit_length()

    @property
    def pivot_bytes(self) -> int:
        """Bytes of a stored pivot."""
        return packed_size(self.d_v, self.pivot_bits)

    @property
    def gain_bytes(self) -> int:
        """Bytes of the stored gains."""
        return packed_size(self.d_k, self.gain_bits)

    @property
    def low_rows(self) -> int:
        """Rows of ``low``."""
        return packed_size(self.d_v, 4)

    @property
    def high_rows(self) -> int:
        """Rows of ``high``."""
        return packed_size(self.d_v, 1)

    @property
    def in_small_tiles(self) -> Head:
        """The same head in tiles that take few registers."""
        return replace(self, block_v=max(8, self.rotated))
