"""The stored fields of the pivot formats (pivot.py) in Triton: coded, packed, written and read, a tile at a time."""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806, RET505, RUF005

from typing import Any, NamedTuple

import triton
import triton.language as tl

from mamba_checkpoint_cache.codec.gpu_kernels import is_finite
from mamba_checkpoint_cache.codec.gpu_pivot_tiles import (
    channels_of,
    columns_of,
    flip,
    fold,
    rotate,
    rotate_back,
    rows_of,
    unfold,
)


class Stored(NamedTuple):
    """Pointers to the fields of one stored head; ``high`` is None where ``q`` is in bytes."""

    q: Any
    high: Any
    exponent: Any
    pivot: Any
    gain: Any
    scale: Any


@triton.jit
def locate_stored(i_stored, p_q, p_high, p_exponent, p_pivot, p_gain, p_scale, H: tl.constexpr):
    """The fields of the stored head of that number, out of those of all heads."""
    if p_high is None:
        p_q += i_stored * (H.d_v * H.d_k)
    else:
        p_q += i_stored * (H.low_rows * H.d_k)
        p_high += i_stored * (H.high_rows * H.d_k)
    return Stored(
        p_q,
        p_high,
        p_exponent + i_stored,
        p_pivot + i_stored * H.pivot_bytes,
        p_gain + i_stored * H.gain_bytes,
        p_scale + i_stored * H.d_k,
    )


@triton.jit
def _encode(values, ROUND_UP: tl.constexpr, CODE: tl.constexpr):
    """The codes of a Minifloat."""
    add = (1 << CODE.shift) - 1 if ROUND_UP else 1 << CODE.shift - 1
    codes = ((values.to(tl.int32, bitcast=True) + add) >> CODE.shift) - CODE.base
    return tl.minimum(tl.maximum(codes, 0), CODE.largest)


@triton.jit
def _decode(codes, CODE: tl.constexpr):
    """The numbers behind the codes of a Minifloat without a zero."""
    return ((codes + CODE.base) << CODE.shift).to(tl.float32, bitcast=True)


@triton.jit
def _decode_gains(codes, H: tl.constexpr):
    """``g`` of its codes."""
    size = codes & H.gain.largest
    gain = tl.where(size > 0, _decode(size, H.gain), 0.0) * (1.0 / (1 << H.pivot_bits))
    return flip(gain, codes >> (H.gain_bits - 1))


@triton.jit
def _pair(codes, BITS: tl.constexpr):
    """Neighbours along the last axis as one code of twice as many bits, the first in the lower half."""
    a, b = tl.split(tl.reshape(codes, codes.shape[:-1] + [codes.shape[-1] // 2, 2]))
    return a | (b << BITS)


@triton.jit
def store_pivot(stored, p_column, unit, H: tl.constexpr):
    """Store ``u`` of the channel at ``p_column``; returns ``<u, u>``."""
    N: tl.constexpr = 1 << (H.pivot_bits - 1)
    o_v = tl.arange(0, H.padded_v)
    x = tl.load(p_column + o_v.to(tl.int64) * H.stride_v, mask=o_v < H.d_v, other=0.0).to(tl.float32)
    x = tl.permute(tl.reshape(tl.where(is_finite(x), x, 0.0), [1, H.padded_v // H.rotated, H.rotated, 1]), [0, 2, 1, 3])
    p = tl.reshape(tl.permute(rotate(x, 0), [0, 2, 1, 3]), [H.padded_v]) * unit
    step = tl.max(tl.abs(p)) * (1.0 / N)
    step = tl.where(step > 0, step, 1.0)
    codes = tl.floor(tl.div_rn(p, tl.full([H.padded_v], 1.0, tl.float32) * step))
    codes = tl.minimum(tl.maximum(codes, -N), N - 1).to(tl.int32) + N
    codes = tl.where(o_v < H.d_v, codes, 0)
    packed = codes.to(tl.uint8)
    if H.pivot_bits == 2:
        packed = _pair(packed, 2)
    packed = _pair(packed, 4)
    o_b = tl.arange(0, packed.shape[0])
    tl.store(stored.pivot + o_b, packed, mask=o_b < H.pivot_bytes)
    u = tl.where(o_v < H.d_v, 2 * codes + 1 - 2 * N, 0)
    return tl.sum(u * u).to(tl.float32)


@triton.jit
def load_pivot(stored, v, H: tl.constexpr):
    """``u`` of the rows of a tile, ``[1, J, W, 1]``, 0 below the last."""
    PER_BYTE: tl.constexpr = 8 // H.pivot_bits
    o_b = v // PER_BYTE + tl.arange(0, H.block_v // PER_BYTE)
    packed = tl.load(stored.pivot + o_b, mask=o_b < H.pivot_bytes, other=0).to(tl.int32)
    codes = tl.reshape(packed[:, None] >> (tl.arange(0, PER_BYTE) * H.pivot_bits)[None, :], [H.block_v])
    u = 2 * (codes & ((1 << H.pivot_bits) - 1)) + 1 - (1 << H.pivot_bits)
    u = tl.where(v + tl.arange(0, H.block_v) < H.d_v, u, 0).to(tl.float32)
    return tl.permute(tl.reshape(u, [1, H.block_v // H.rotated, H.rotated, 1]), [0, 2, 1, 3])


@triton.jit
def store_gains(stored, gain, k, H: tl.constexpr):
    """Store ``g`` of the channels of a tile, ``[C, 1, 1, L]``; returns what is read back."""
    codes = _encode(tl.abs(gain) * (1 << H.pivot_bits), False, H.gain)
    codes = tl.where((gain < 0) & (codes > 0), codes + H.gain.largest + 1, codes)
    packed = tl.reshape(tl.permute(codes.to(tl.uint8), [1, 2, 3, 0]), [H.block_k])
    if H.gain_bits == 4:
        packed = _pair(packed, 4)
    o_b = k * H.gain_bits // 8 + tl.arange(0, packed.shape[0])
    tl.store(stored.gain + o_b, packed, mask=o_b < H.gain_bytes)
    return _decode_gains(codes, H)


@triton.jit
def load_gains(stored, k, H: tl.constexpr):
    """``g`` of the channels of a tile, ``[C, 1, 1, L]``."""
    o_k = channels_of(k, H)
    codes = tl.load(stored.gain + o_k * H.gain_bits // 8, mask=o_k < H.d_k, other=0).to(tl.int32)
    return _decode_gains((codes >> (o_k * H.gain_bits % 8)) & ((1 << H.gain_bits) - 1), H)


@triton.jit
def store_scales(stored, least, k, H: tl.constexpr):
    """Store ``s`` of the channels of a tile, ``[C, 1, 1, L]``, not smaller than ``least``; returns what is read back."""
    codes = _encode(least, True, H.scale)
    o_k = channels_of(k, H)
    tl.store(stored.scale + o_k, codes.to(tl.uint8), mask=o_k < H.d_k)
    return _decode(codes, H.scale)


@triton.jit
def load_scales(stored, k, H: tl.constexpr):
    """``s`` of the channels of a tile, ``[C, 1, 1, L]``."""
    o_k = channels_of(k, H)
    return _decode(tl.load(stored.scale + o_k, mask=o_k < H.d_k, other=0).to(tl.int32), H.scale)


@triton.jit
def store_q(stored, q, v, k, H: tl.constexpr):
    """Store int8 ``q`` of a tile ``[rows, channels]``: in bytes, or in five bits where there is a ``high``."""
    o_k = k + tl.arange(0, H.block_k)
    if stored.high is None:
        o_v = v + tl.arange(0, H.block_v)[None, :, None]  # a third axis, lest loads take over how stores are laid out
        tl.store(stored.q + o_v.to(tl.int64) * H.d_k + o_k, q[None, :, :], mask=(o_v < H.d_v) & (o_k < H.d_k))
    else:
        m_k = (o_k < H.d_k)[:, None]
        o_k = o_k.to(tl.int64)[:, None]
        codes = tl.where((v + tl.arange(0, H.block_v) < H.d_v)[None, :], (tl.trans(q) + H.levels + 1).to(tl.uint8), 0)
        o_b = v // 2 + tl.arange(0, H.block_v // 2)[None, :]
        tl.store(stored.q + o_b * H.d_k + o_k, _pair(codes & 15, 4), mask=(o_b < H.low_rows) & m_k)
        o_b = v // 8 + tl.arange(0, H.block_v // 8)[None, :]
        tl.store(stored.high + o_b * H.d_k + o_k, _pair(_pair(_pair(codes >> 4, 1), 2), 4), mask=(o_b < H.high_rows) & m_k)


@triton.jit
def load_q(stored, v, k, H: tl.constexpr):
    """What :func:`store_q` stored, in float32."""
    o_v, o_k = rows_of(v, H), columns_of(k, H).to(tl.int64)
    mask = (o_v < H.d_v) & (o_k < H.d_k)
    if stored.high is None:
        return tl.load(stored.q + o_v * H.d_k + o_k, mask=mask, other=0).to(tl.float32)
    else:
        low = tl.load(stored.q + o_v // 2 * H.d_k + o_k, mask=mask, other=0).to(tl.int32) >> (o_v % 2 * 4)
        high = tl.load(stored.high + o_v // 8 * H.d_k + o_k, mask=mask, other=0).to(tl.int32) >> (o_v % 8)
        return tl.where(mask, (low & 15) + ((high & 1) << 4) - H.levels - 1, 0).to(tl.float32)


@triton.jit
def load_restored(stored, exponent, v, k, dtype, H: tl.constexpr):
    """What a tile is restored as, ``[rows, channels]``."""
    y = fold(load_q(stored, v, k, H), H) * load_scales(stored, k, H) + load_pivot(stored, v, H) * load_gains(stored, k, H)
    y = unfold(rotate_back(y, v, exponent), H)
    return tl.minimum(tl.maximum(y, -H.limit), H.limit).to(dtype)
