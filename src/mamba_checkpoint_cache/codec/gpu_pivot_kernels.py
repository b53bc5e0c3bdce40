"""The Triton kernels of the pivot formats (pivot.py), each one launch for every layer and head of every slot.

A tile ``[rows, channels]`` is worked on as ``[C, J, W, L]``: row ``J w + j``, channel ``C l + c``. J are the rows that are
rotated together; lanes lie along L and warps along W, so that a thread holds all it needs to rotate. What is stored is the
reference's bit for bit, but where a sum in another order moves a gain to the next code.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806, PLR0912, PLR0915, RET505, RUF005

from __future__ import annotations

from dataclasses import dataclass, replace

import triton
import triton.language as tl

from mamba_checkpoint_cache.codec.gpu_kernels import ROUND, UNALIGNED, UNSPECIALIZED, _finite, _locate
from mamba_checkpoint_cache.codec.pivot import SCALE, Minifloat, block_of, packed_size

LANES = 32


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


@triton.jit
def _rows(v, H: tl.constexpr):
    return (v + tl.arange(0, H.block_v))[:, None]


@triton.jit
def _columns(k, H: tl.constexpr):
    return (k + tl.arange(0, H.block_k))[None, :]


@triton.jit
def _channels(k, H: tl.constexpr):
    """The channels of a tile, ``[C, 1, 1, L]``."""
    C: tl.constexpr = H.block_k // H.lanes
    return k + tl.arange(0, C)[:, None, None, None] + tl.arange(0, H.lanes)[None, None, None, :] * C


@triton.jit
def _fold(x, H: tl.constexpr):
    """``[rows, channels]`` as ``[C, J, W, L]``."""
    return tl.permute(tl.reshape(x, [H.block_v // H.rotated, H.rotated, H.lanes, H.block_k // H.lanes]), [3, 1, 0, 2])


@triton.jit
def _unfold(x, H: tl.constexpr):
    """``[C, J, W, L]`` as ``[rows, channels]``."""
    return tl.reshape(tl.permute(x, [2, 1, 3, 0]), [H.block_v, H.block_k])


@triton.jit
def _load(p_head, v, k, H: tl.constexpr):
    """A tile of the state in float32, with zeros beyond the head."""
    o_v, o_k = _rows(v, H), _columns(k, H)
    p_x = p_head + o_v.to(tl.int64) * H.stride_v + o_k.to(tl.int64) * H.stride_k
    return tl.load(p_x, mask=(o_v < H.d_v) & (o_k < H.d_k), other=0.0).to(tl.float32)


@triton.jit
def _power_of_two(exponent):
    """``2 ** (exponent - 127)``."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _flip(x, negative):
    """``-x`` where ``negative`` is odd, else ``x``."""
    return (x.to(tl.int32, bitcast=True) ^ (negative << 31)).to(tl.float32, bitcast=True)


@triton.jit
def _signed(x, v, size):
    """``D x`` times a scalar, of a tile ``[C, J, W, L]`` of rows from ``v`` on."""
    J: tl.constexpr = x.shape[1]
    o_j = tl.arange(0, J)
    mixed = (1 + v + tl.arange(0, x.shape[2])[:, None] * J + o_j[None, :]).to(tl.uint32) * 0x9E3779B1
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B
    negative = tl.sum((mixed >> 31 << o_j[None, :]).to(tl.int32), 1)  # J bits for each w: few registers
    return x * _flip(size, negative[None, None, :, None] >> o_j[None, :, None, None])


@triton.jit
def _butterflies(x, APART: tl.constexpr):
    """Between rows so far apart, of a tile ``[C, J, W, L]``."""
    pairs = tl.reshape(x, [x.shape[0], x.shape[1] // APART // 2, 2, APART, x.shape[2], x.shape[3]])
    a, b = tl.split(tl.permute(pairs, [0, 1, 3, 4, 5, 2]))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), [0, 1, 5, 2, 3, 4]), x.shape)


@triton.jit
def _rotate(x, v):
    """``H D x / B``."""
    J: tl.constexpr = x.shape[1]
    x = _signed(x, v, tl.cast(1.0 / J, tl.float32))
    for i in tl.static_range(8):
        if 1 << i < J:
            x = _butterflies(x, 1 << i)
    return x


@triton.jit
def _rotate_back(x, v, exponent):
    """``D H x 2^e``."""
    J: tl.constexpr = x.shape[1]
    for i in tl.static_range(7, -1, -1):
        if 1 << i < J:
            x = _butterflies(x, 1 << i)
    return _signed(x, v, _power_of_two(exponent))


@triton.jit
def _most(x):
    """The largest magnitude in each channel of a tile, ``[C, 1, 1, L]``."""
    return tl.max(tl.max(tl.abs(x), 1, keep_dims=True), 2, keep_dims=True)


@triton.jit
def _load_rotated(p_head, v, k, H: tl.constexpr):
    """A tile of ``H D X / B``, ``[C, J, W, L]``."""
    x = _load(p_head, v, k, H)
    return _rotate(_fold(tl.where(_finite(x), x, 0.0), H), v)


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
    return _flip(gain, codes >> (H.gain_bits - 1))


@triton.jit
def _pair(codes, BITS: tl.constexpr):
    """Neighbours along the last axis as one code of twice as many bits, the first in the lower half."""
    a, b = tl.split(tl.reshape(codes, codes.shape[:-1] + [codes.shape[-1] // 2, 2]))
    return a | (b << BITS)


@triton.jit
def _store_pivot(p_column, p_pivot, unit, H: tl.constexpr):
    """Store ``u`` of the channel at ``p_column``; returns ``<u, u>``."""
    N: tl.constexpr = 1 << (H.pivot_bits - 1)
    o_v = tl.arange(0, H.padded_v)
    x = tl.load(p_column + o_v.to(tl.int64) * H.stride_v, mask=o_v < H.d_v, other=0.0).to(tl.float32)
    x = tl.permute(tl.reshape(tl.where(_finite(x), x, 0.0), [1, H.padded_v // H.rotated, H.rotated, 1]), [0, 2, 1, 3])
    p = tl.reshape(tl.permute(_rotate(x, 0), [0, 2, 1, 3]), [H.padded_v]) * unit
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
    tl.store(p_pivot + o_b, packed, mask=o_b < H.pivot_bytes)
    u = tl.where(o_v < H.d_v, 2 * codes + 1 - 2 * N, 0)
    return tl.sum(u * u).to(tl.float32)


@triton.jit
def _load_pivot(p_pivot, v, H: tl.constexpr):
    """``u`` of the rows of a tile, ``[1, J, W, 1]``, 0 below the last."""
    PER_BYTE: tl.constexpr = 8 // H.pivot_bits
    o_b = v // PER_BYTE + tl.arange(0, H.block_v // PER_BYTE)
    packed = tl.load(p_pivot + o_b, mask=o_b < H.pivot_bytes, other=0).to(tl.int32)
    codes = tl.reshape(packed[:, None] >> (tl.arange(0, PER_BYTE) * H.pivot_bits)[None, :], [H.block_v])
    u = 2 * (codes & ((1 << H.pivot_bits) - 1)) + 1 - (1 << H.pivot_bits)
    u = tl.where(v + tl.arange(0, H.block_v) < H.d_v, u, 0).to(tl.float32)
    return tl.permute(tl.reshape(u, [1, H.block_v // H.rotated, H.rotated, 1]), [0, 2, 1, 3])


@triton.jit
def _store_gains(p_gain, codes, k, H: tl.constexpr):
    packed = tl.reshape(tl.permute(codes.to(tl.uint8), [1, 2, 3, 0]), [H.block_k])
    if H.gain_bits == 4:
        packed = _pair(packed, 4)
    o_b = k * H.gain_bits // 8 + tl.arange(0, packed.shape[0])
    tl.store(p_gain + o_b, packed, mask=o_b < H.gain_bytes)


@triton.jit
def _load_gains(p_gain, k, H: tl.constexpr):
    """``g`` of the channels of a tile, ``[C, 1, 1, L]``."""
    o_k = _channels(k, H)
    codes = tl.load(p_gain + o_k * H.gain_bits // 8, mask=o_k < H.d_k, other=0).to(tl.int32)
    return _decode_gains((codes >> (o_k * H.gain_bits % 8)) & ((1 << H.gain_bits) - 1), H)


@triton.jit
def _load_scales(p_scale, k, H: tl.constexpr):
    """``s`` of the channels of a tile, ``[C, 1, 1, L]``."""
    o_k = _channels(k, H)
    return _decode(tl.load(p_scale + o_k, mask=o_k < H.d_k, other=0).to(tl.int32), H.scale)


@triton.jit
def _store_q(p_q, p_high, q, v, k, H: tl.constexpr):
    """Store int8 ``q`` of a tile ``[rows, channels]``: in bytes, or in five bits where there is a ``p_high``."""
    o_k = k + tl.arange(0, H.block_k)
    if p_high is None:
        o_v = v + tl.arange(0, H.block_v)[None, :, None]  # a third axis, lest loads take over how stores are laid out
        tl.store(p_q + o_v.to(tl.int64) * H.d_k + o_k, q[None, :, :], mask=(o_v < H.d_v) & (o_k < H.d_k))
    else:
        m_k = (o_k < H.d_k)[:, None]
        o_k = o_k.to(tl.int64)[:, None]
        codes = tl.where((v + tl.arange(0, H.block_v) < H.d_v)[None, :], (tl.trans(q) + H.levels + 1).to(tl.uint8), 0)
        o_b = v // 2 + tl.arange(0, H.block_v // 2)[None, :]
        tl.store(p_q + o_b * H.d_k + o_k, _pair(codes & 15, 4), mask=(o_b < H.low_rows) & m_k)
        o_b = v // 8 + tl.arange(0, H.block_v // 8)[None, :]
        tl.store(p_high + o_b * H.d_k + o_k, _pair(_pair(_pair(codes >> 4, 1), 2), 4), mask=(o_b < H.high_rows) & m_k)


@triton.jit
def _load_q(p_q, p_high, v, k, H: tl.constexpr):
    """What :func:`_store_q` stored, in float32."""
    o_v, o_k = _rows(v, H), _columns(k, H).to(tl.int64)
    mask = (o_v < H.d_v) & (o_k < H.d_k)
    if p_high is None:
        return tl.load(p_q + o_v * H.d_k + o_k, mask=mask, other=0).to(tl.float32)
    else:
        low = tl.load(p_q + o_v // 2 * H.d_k + o_k, mask=mask, other=0).to(tl.int32) >> (o_v % 2 * 4)
        high = tl.load(p_high + o_v // 8 * H.d_k + o_k, mask=mask, other=0).to(tl.int32) >> (o_v % 8)
        return tl.where(mask, (low & 15) + ((high & 1) << 4) - H.levels - 1, 0).to(tl.float32)


@triton.jit
def _restored(y, v, exponent, dtype, H: tl.constexpr):
    """What ``q s + g u`` of a tile ``[C, J, W, L]`` is restored as, ``[rows, channels]``."""
    y = _unfold(_rotate_back(y, v, exponent), H)
    return tl.minimum(tl.maximum(y, -H.limit), H.limit).to(dtype)


@triton.jit
def _load_restored(p_q, p_high, p_pivot, p_gain, p_scale, exponent, v, k, dtype, H: tl.constexpr):
    """A restored tile of a stored head, ``[rows, channels]``."""
    q = _fold(_load_q(p_q, p_high, v, k, H), H)
    y = q * _load_scales(p_scale, k, H) + _load_pivot(p_pivot, v, H) * _load_gains(p_gain, k, H)
    return _restored(y, v, exponent, dtype, H)


@triton.jit
def _find_pivot(p_head, H: tl.constexpr):
    """The largest magnitude of ``R`` and the first channel that has it, in more than one tile."""
    largest = tl.cast(0.0, tl.float32)
    i_pivot = tl.cast(0, tl.int32)
    for k in range(0, H.d_k, H.block_k):
        o_k = _channels(k, H)
        amax = tl.zeros(o_k.shape, tl.float32)
        for v in range(0, H.d_v, H.block_v):
            amax = tl.maximum(amax, _most(_load_rotated(p_head, v, k, H)))
        most = tl.max(amax)
        i_pivot = tl.where(most > largest, tl.min(tl.where(amax == most, o_k, H.d_k)), i_pivot)
        largest = tl.maximum(most, largest)
    return largest, i_pivot


@triton.jit(noinline=True)
def _measure(p_head, p_q, p_high, p_pivot, p_gain, p_scale, exponent, unit, H: tl.constexpr):
    """The report of a stored head that has elements which are not finite."""
    signal = tl.cast(0.0, tl.float32)
    error = tl.cast(0.0, tl.float32)
    non_finite = tl.cast(0, tl.int32)
    for k in range(0, H.d_k, H.block_k):
        for v in range(0, H.d_v, H.block_v):
            y = _load_restored(p_q, p_high, p_pivot, p_gain, p_scale, exponent, v, k, p_head.dtype.element_ty, H)
            x = _load(p_head, v, k, H)
            clean = tl.where(_finite(x), x, 0.0)
            s = clean * unit
            e = (clean - y.to(tl.float32)) * unit
            signal += tl.sum(s * s)
            error += tl.sum(e * e)
            non_finite += tl.sum(tl.where(_finite(x), 0, 1))
    return signal, error, non_finite


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def pivot_compress_kernel(
    p_state, p_q, p_high, p_exponent, p_pivot, p_gain, p_scale, p_report,
    p_state_rows, p_stored_rows, state_row, stored_row, num_stored_rows, stride_layer, stride_row, stride_head,
    NUM_LAYERS: tl.constexpr, NUM_HEADS: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Compress and measure one head."""
    o_head, i_stored = _locate(
        p_state_rows, p_stored_rows, state_row, stored_row, num_stored_rows, stride_layer, stride_row, stride_head,
        NUM_LAYERS, NUM_HEADS,
    )  # fmt: skip
    p_head = p_state + o_head
    if p_high is None:
        p_q += i_stored * (H.d_v * H.d_k)
    else:
        p_q += i_stored * (H.low_rows * H.d_k)
        p_high += i_stored * (H.high_rows * H.d_k)
    p_pivot += i_stored * H.pivot_bytes
    p_gain += i_stored * H.gain_bytes
    p_scale += i_stored * H.d_k

    if H.is_one_tile:
        r = _load_rotated(p_head, 0, 0, H)
        amax = _most(r)
        largest = tl.max(amax)
        i_pivot = tl.min(tl.where(amax == largest, _channels(0, H), H.d_k))
    else:
        largest, i_pivot = _find_pivot(p_head, H)
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 1), 253)
    unit = _power_of_two(254 - exponent)
    tl.store(p_exponent + i_stored, exponent.to(tl.uint8))
    uu = _store_pivot(p_head + i_pivot.to(tl.int64) * H.stride_k, p_pivot, unit, H)
    tl.debug_barrier()  # every thread reads what others have stored
    if H.is_one_tile:
        r *= unit
        u = _load_pivot(p_pivot, 0, H)

    signal = tl.cast(0.0, tl.float32)
    error = tl.cast(0.0, tl.float32)
    for k in range(0, H.d_k, H.block_k):
        o_k = _channels(k, H)
        total = tl.zeros(o_k.shape, tl.float32)
        for v in range(0, H.d_v, H.block_v):
            if not H.is_one_tile:
                r, u = _load_rotated(p_head, v, k, H) * unit, _load_pivot(p_pivot, v, H)
            total += tl.sum(tl.sum(r * u, 1, keep_dims=True), 2, keep_dims=True)
        gain = tl.div_rn(total, tl.full(o_k.shape, 1.0, tl.float32) * uu)
        codes = _encode(tl.abs(gain) * (1 << H.pivot_bits), False, H.gain)
        codes = tl.where(gain < 0, codes + H.gain.largest + 1, codes)
        _store_gains(p_gain, codes, k, H)
        gain = _decode_gains(codes, H)

        amax = tl.zeros(o_k.shape, tl.float32)
        for v in range(0, H.d_v, H.block_v):
            if not H.is_one_tile:
                r, u = _load_rotated(p_head, v, k, H) * unit, _load_pivot(p_pivot, v, H)
            amax = tl.maximum(amax, _most(r - u * gain))
        codes = _encode(tl.div_rn(amax, tl.full(o_k.shape, H.levels, tl.float32)), True, H.scale)
        tl.store(p_scale + o_k, codes.to(tl.uint8), mask=o_k < H.d_k)
        scale = _decode(codes, H.scale)
        inverse = tl.div_rn(tl.full(o_k.shape, 1.0, tl.float32), scale)

        for v in range(0, H.d_v, H.block_v):
            if not H.is_one_tile:
                r, u = _load_rotated(p_head, v, k, H) * unit, _load_pivot(p_pivot, v, H)
            rounded = (r - u * gain) * inverse + ROUND
            _store_q(p_q, p_high, _unfold(rounded.to(tl.int32, bitcast=True).to(tl.int8), H), v, k, H)
            tl.debug_barrier()
            y = _load_restored(p_q, p_high, p_pivot, p_gain, p_scale, exponent, v, k, p_state.dtype.element_ty, H).to(tl.float32)
            x = _load(p_head, v, k, H)
            s = x * unit
            e = (x - y) * unit
            signal += tl.sum(s * s)
            error += tl.sum(e * e)

    non_finite = tl.cast(0, tl.int32)
    if not signal < float("inf"):
        tl.debug_barrier()
        signal, error, non_finite = _measure(
            p_head, p_q, p_high, p_pivot, p_gain, p_scale, exponent, unit, H.in_small_tiles
        )  # fmt: skip
    square = unit.to(tl.float64) * unit.to(tl.float64)
    p_out = p_report + tl.program_id(0).to(tl.int64) * 3
    tl.store(p_out, signal.to(tl.float64) / square)
    tl.store(p_out + 1, error.to(tl.float64) / square)
    tl.store(p_out + 2, non_finite.to(tl.float64))


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def pivot_restore_kernel(
    p_state, p_q, p_high, p_exponent, p_pivot, p_gain, p_scale,
    p_state_rows, p_stored_rows, state_row, stored_row, num_stored_rows, stride_layer, stride_row, stride_head,
    NUM_LAYERS: tl.constexpr, NUM_HEADS: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Decompress one tile of one head."""
    o_head, i_stored = _locate(
        p_state_rows, p_stored_rows, state_row, stored_row, num_stored_rows, stride_layer, stride_row, stride_head,
        NUM_LAYERS, NUM_HEADS,
    )  # fmt: skip
    if p_high is None:
        p_q += i_stored * (H.d_v * H.d_k)
    else:
        p_q += i_stored * (H.low_rows * H.d_k)
        p_high += i_stored * (H.high_rows * H.d_k)
    p_pivot += i_stored * H.pivot_bytes
    p_gain += i_stored * H.gain_bytes
    p_scale += i_stored * H.d_k
    k, v = tl.program_id(1) * H.block_k, tl.program_id(2) * H.block_v
    exponent = tl.load(p_exponent + i_stored).to(tl.int32)
    y = _load_restored(p_q, p_high, p_pivot, p_gain, p_scale, exponent, v, k, p_state.dtype.element_ty, H)
    o_v, o_k = _rows(v, H), _columns(k, H)
    p_x = p_state + o_head + o_v.to(tl.int64) * H.stride_v + o_k.to(tl.int64) * H.stride_k
    tl.store(p_x, y, mask=(o_v < H.d_v) & (o_k < H.d_k))
