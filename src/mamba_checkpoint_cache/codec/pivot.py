"""The pivot formats: rotate along d_v, predict every k-channel from the strongest one, quantise what is left.

Recurrent states are sums of few outer products: most of a head's energy lies in one of them, and a channel is largely a multiple
of another. What remains once that is subtracted is small, and after a random-sign Hadamard rotation (QuIP, arXiv 2307.13304)
near-Gaussian, so that few levels are wasted on outliers. The rotation runs along d_v only: it leaves the k-channels apart, of
which the read-out weighs some far more than others.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mamba_checkpoint_cache.codec.call import Field
from mamba_checkpoint_cache.codec.reference import TableCodec, measure

MAX_BLOCK = 16
"""Rows that are rotated together at most."""
ONE = 127
"""The exponent byte of a float32 in [1, 2)."""


class Minifloat(NamedTuple):
    """Positive numbers in ``exponent_bits + mantissa_bits`` bits: float32 without its sign, and cut at both ends.

    The largest code stands for a number just under ``2 ** (top + 1)``; code 0 is 0, or the smallest number (``zero=False``).
    """

    exponent_bits: int
    mantissa_bits: int
    top: int
    zero: bool

    @property
    def _shift(self) -> int:
        return 23 - self.mantissa_bits

    @property
    def largest(self) -> int:
        """The largest code."""
        return (1 << self.exponent_bits + self.mantissa_bits) - 1

    @property
    def base(self) -> int:
        """What a code lacks to the upper bits of its float32."""
        return (ONE + self.top + 1 << self.mantissa_bits) - 1 - self.largest

    def encode(self, values: Tensor, *, up: bool) -> Tensor:
        """Codes (int32) of float32 ``values`` that are at least 0: not less than the value with ``up``, else the nearest."""
        add = (1 << self._shift) - 1 if up else 1 << self._shift - 1
        return ((values.view(torch.int32) + add >> self._shift) - self.base).clamp(0, self.largest)

    def decode(self, codes: Tensor) -> Tensor:
        """The float32 numbers behind ``codes`` (int32)."""
        values = (codes + self.base << self._shift).view(torch.float32)
        return values.where(codes > 0, 0) if self.zero else values


SCALE = Minifloat(exponent_bits=5, mantissa_bits=3, top=0, zero=False)
"""A scale reaches 2^-31 below the pivot's largest element: smaller channels are stored as zeros."""


class Precision(NamedTuple):
    """How finely the prediction is stored: it may cost no more than the scales of int8, which follow the state's dtype too.

    ``pivot_bits`` per row; ``gain`` and a sign per channel. The prediction is best for the pivot as it is stored: an error
    in it costs only what it fails to predict.
    """

    pivot_bits: int
    gain: Minifloat

    @property
    def gain_bits(self) -> int:
        """Bits of a stored gain, its sign among them."""
        return 1 + self.gain.exponent_bits + self.gain.mantissa_bits


FINE = Precision(4, Minifloat(exponent_bits=4, mantissa_bits=3, top=1, zero=True))
COARSE = Precision(2, Minifloat(exponent_bits=3, mantissa_bits=0, top=1, zero=True))


def precision_of(dtype: torch.dtype) -> Precision:
    """That of a state's dtype: bfloat16 states have half the bytes to spare."""
    return COARSE if dtype == torch.bfloat16 else FINE


class PivotCodec(TableCodec):
    """``levels`` on either side of zero for what a prediction from one channel leaves, in a rotated basis.

    For one head ``X`` (float32, NaN and infinities taken as 0), with ``B`` the largest power of two that divides ``d_v``, at most
    16, ``H`` the Hadamard matrix of order B on each block of B rows, and ``D`` fixed random signs:

    1. ``R = (H D X / B) / 2^e``, where ``e`` brings the largest magnitude of R into [1, 2); the pivot is the channel it lies in.
    2. ``u``: the pivot in odd integers, ``2 floor(n p / max|p|) + 1`` within ``±(2n - 1)``, ``n = 2^(pivot_bits - 1)``.
    3. ``g_k = <R_k, u> / <u, u>``, summed row by row, times ``2n``, as sign and :class:`Minifloat`; 0 has no sign.
    4. ``s_k``: ``max_v |R_k - g_k u| / levels``, rounded up to a :class:`Minifloat`; ``q = round((R_k - g_k u) * (1 / s_k))``,
       half to even, which is within ±``levels`` as s_k was rounded up.

    Restored is ``D H (q s + g u) 2^e``, clamped to the finite numbers of the state's dtype. At ``d_v = d_k = 128`` everything
    but ``q`` takes 0.157 bits per element, 0.110 for bfloat16 states.
    """

    lossy = True
    levels: int

    def fields(self, num_heads: int, d_v: int, d_k: int, dtype: torch.dtype) -> dict[str, Field]:
        """``exponent`` (``e + 127``) ``[num_heads]``, ``pivot`` (d_v), ``gain`` and ``scale`` (d_k) in bytes, packed; ``q``."""
        fine = precision_of(dtype)
        return {
            **self._q_fields(num_heads, d_v, d_k),
            "exponent": ((num_heads,), torch.uint8),
            "pivot": ((num_heads, packed_size(d_v, fine.pivot_bits)), torch.uint8),
            "gain": ((num_heads, packed_size(d_k, fine.gain_bits)), torch.uint8),
            "scale": ((num_heads, d_k), torch.uint8),
        }

    def _q_fields(self, num_heads: int, d_v: int, d_k: int) -> dict[str, Field]:
        """The compressed tensors that hold ``q``."""
        return {"q": ((num_heads, d_v, d_k), torch.int8)}

    def _put(self, row: dict[str, Tensor], q: Tensor) -> None:
        """Store ``q`` ``[num_heads, d_v, d_k]``, integers in float32."""
        row["q"].copy_(q)

    def _take(self, row: dict[str, Tensor], d_v: int) -> Tensor:
        """What :meth:`_put` stored."""
        return row["q"].float()

    def _encode(self, state: Tensor, row: dict[str, Tensor]) -> Tensor:
        d_k, fine = state.shape[-1], precision_of(state.dtype)
        rotated = rotate(torch.where(state.isfinite(), state, 0).float())
        largest, pivot = rotated.abs().amax(-2).max(-1)  # the first of equally large channels
        exponent = (largest.view(torch.int32) >> 23).clamp(1, 2 * ONE - 1)
        rotated = rotated * power_of_two(2 * ONE - exponent)[:, None, None]
        row["exponent"].copy_(exponent)

        p = rotated.gather(-1, pivot[:, None, None].expand(-1, rotated.shape[1], 1))[..., 0]
        n = 1 << fine.pivot_bits - 1
        step = p.abs().amax(-1, keepdim=True) / n
        codes = (p / step.where(step > 0, 1)).floor().clamp(-n, n - 1).int() + n
        row["pivot"].copy_(pack(codes, fine.pivot_bits))
        u = self._pivot(row, fine, len(p[0]))

        total = torch.zeros_like(rotated[:, 0])
        for v in range(rotated.shape[1]):  # in the order that a fused loop sums in
            total = total + rotated[:, v] * u[:, v]
        gain = total / u.square().sum(-2)
        codes = fine.gain.encode(gain.abs() * (2 * n), up=False)
        negative = ((gain < 0) & (codes > 0)).int() << fine.gain_bits - 1  # that of a 0 hangs on the last bit of a sum
        row["gain"].copy_(pack(codes | negative, fine.gain_bits))

        rest = rotated - u * self._gain(row, fine, d_k)
        scale = rest.abs().amax(-2)
        codes = SCALE.encode(scale / torch.full_like(scale, self.levels), up=True)
        row["scale"].copy_(codes)
        inverse = 1 / SCALE.decode(codes)[:, None]
        self._put(row, (rest * inverse).round())
        return measure(state, self._decode(row, state))

    def _decode(self, row: dict[str, Tensor], like: Tensor) -> Tensor:
        _, d_v, d_k = like.shape
        fine = precision_of(like.dtype)
        predicted = self._pivot(row, fine, d_v) * self._gain(row, fine, d_k)
        rotated = self._take(row, d_v) * SCALE.decode(row["scale"].int())[:, None] + predicted
        limit = torch.finfo(like.dtype).max
        restored = rotate_back(rotated) * power_of_two(row["exponent"].int())[:, None, None]
        return restored.clamp(-limit, limit).to(like.dtype)

    @staticmethod
    def _pivot(row: dict[str, Tensor], fine: Precision, d_v: int) -> Tensor:
        codes = unpack(row["pivot"], fine.pivot_bits, d_v) - (1 << fine.pivot_bits - 1)
        return (2 * codes + 1).float()[..., None]

    @staticmethod
    def _gain(row: dict[str, Tensor], fine: Precision, d_k: int) -> Tensor:
        codes = unpack(row["gain"], fine.gain_bits, d_k)
        sign = 1 - 2 * (codes >> fine.gain_bits - 1)
        size = fine.gain.decode(codes & fine.gain.largest) / (1 << fine.pivot_bits)
        return (sign * size)[:, None]


class Int8PivotCodec(PivotCodec):
    """The default: no more bytes than int8, and a fraction of its drift."""

    name = "int8-pivot"
    levels = 127


class Int5PivotCodec(PivotCodec):
    """For cold storage: ``q + 16`` in five bits, the low four in ``low`` (two rows to a byte), the fifth in ``high`` (eight)."""

    name = "int5-pivot"
    levels = 15

    def _q_fields(self, num_heads: int, d_v: int, d_k: int) -> dict[str, Field]:
        return {
            "low": ((num_heads, packed_size(d_v, 4), d_k), torch.uint8),
            "high": ((num_heads, packed_size(d_v, 1), d_k), torch.uint8),
        }

    def _put(self, row: dict[str, Tensor], q: Tensor) -> None:
        codes = (q + self.levels + 1).int().mT
        row["low"].copy_(pack(codes & 15, 4).mT)
        row["high"].copy_(pack(codes >> 4, 1).mT)

    def _take(self, row: dict[str, Tensor], d_v: int) -> Tensor:
        codes = unpack(row["low"].mT, 4, d_v) + (unpack(row["high"].mT, 1, d_v) << 4)
        return (codes - self.levels - 1).mT.float()


def block_of(d_v: int) -> int:
    """Rows that are rotated together: the largest power of two that divides ``d_v``, at most :data:`MAX_BLOCK`."""
    return min(d_v & -d_v, MAX_BLOCK)


def signs(d_v: int) -> Tensor:
    """``D``: float32 ``[d_v]`` of ±1, the top bit of a mixed row number (the last rounds of MurmurHash3)."""
    mixed = torch.arange(1, d_v + 1, dtype=torch.int64) * 0x9E3779B1 & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    return 1.0 - 2.0 * (mixed >> 31).float()


def rotate(states: Tensor) -> Tensor:
    """``H D X / B`` of float32 heads ``[num_heads, d_v, d_k]``: no element becomes larger than the largest was."""
    block = block_of(states.shape[1])
    rotated = states * signs(states.shape[1])[:, None] / block
    for apart in _distances(block):
        rotated = _butterflies(rotated, apart)
    return rotated


def rotate_back(rotated: Tensor) -> Tensor:
    """``D H R``, the inverse of :func:`rotate`: its steps in the opposite order."""
    for apart in reversed(_distances(block_of(rotated.shape[1]))):
        rotated = _butterflies(rotated, apart)
    return rotated * signs(rotated.shape[1])[:, None]


def _distances(block: int) -> list[int]:
    """Rows between which the butterflies of a Hadamard matrix run, step by step: the order decides how sums round."""
    return [1 << i for i in range(block.bit_length() - 1)]


def _butterflies(x: Tensor, apart: int) -> Tensor:
    num_heads, d_v, d_k = x.shape
    a, b = x.reshape(num_heads, d_v // (2 * apart), 2, apart, d_k).unbind(2)
    return torch.stack([a + b, a - b], 2).reshape(num_heads, d_v, d_k)


def power_of_two(exponent: Tensor) -> Tensor:
    """``2 ** (exponent - 127)`` in float32, of exponents (int32) in 1 … 254."""
    return (exponent << 23).view(torch.float32)


def packed_size(count: int, bits: int) -> int:
    """Bytes that ``count`` codes of ``bits`` bits take."""
    return math.ceil(count * bits / 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes ``[…, n]`` (int32) of 1, 2, 4 or 8 bits as bytes (int32), the first code in the lowest bits."""
    per_byte = 8 // bits
    missing = -codes.shape[-1] % per_byte
    codes = torch.nn.functional.pad(codes, (0, missing)).reshape(*codes.shape[:-1], -1, per_byte)
    return (codes << _shifts(codes, bits)).sum(-1)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first ``count`` codes (int32) in bytes ``[…, n]``."""
    codes = packed.int()[..., None]
    return (codes >> _shifts(codes, bits) & (1 << bits) - 1).flatten(-2)[..., :count]


def _shifts(codes: Tensor, bits: int) -> Tensor:
    return torch.arange(0, 8, bits, dtype=torch.int32, device=codes.device)
