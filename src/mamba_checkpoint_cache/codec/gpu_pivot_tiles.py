"""Tiles of a state in Triton, rotated as the pivot formats (pivot.py) want them.

A tile ``[rows, channels]`` is worked on as ``[C, J, W, L]``: row ``J w + j``, channel ``C l + c``. J are the rows that are
rotated together; lanes lie along L and warps along W, so that a thread holds all it needs to rotate.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806

import triton
import triton.language as tl

from mamba_checkpoint_cache.codec.gpu_kernels import is_finite


@triton.jit
def rows_of(v, H: tl.constexpr):
    """The rows of a tile, ``[rows, 1]``."""
    return (v + tl.arange(0, H.block_v))[:, None]


@triton.jit
def columns_of(k, H: tl.constexpr):
    """The channels of a tile, ``[1, channels]``."""
    return (k + tl.arange(0, H.block_k))[None, :]


@triton.jit
def channels_of(k, H: tl.constexpr):
    """The same, ``[C, 1, 1, L]``."""
    C: tl.constexpr = H.block_k // H.lanes
    return k + tl.arange(0, C)[:, None, None, None] + tl.arange(0, H.lanes)[None, None, None, :] * C


@triton.jit
def fold(x, H: tl.constexpr):
    """``[rows, channels]`` as ``[C, J, W, L]``."""
    return tl.permute(tl.reshape(x, [H.block_v // H.rotated, H.rotated, H.lanes, H.block_k // H.lanes]), [3, 1, 0, 2])


@triton.jit
def unfold(x, H: tl.constexpr):
    """``[C, J, W, L]`` as ``[rows, channels]``."""
    return tl.reshape(tl.permute(x, [2, 1, 3, 0]), [H.block_v, H.block_k])


@triton.jit
def locate_tile(p_head, v, k, H: tl.constexpr):
    """Pointers to the elements ``[rows, channels]`` of a tile of the state, and which of them exist."""
    o_v, o_k = rows_of(v, H), columns_of(k, H)
    p_tile = p_head + o_v.to(tl.int64) * H.stride_v + o_k.to(tl.int64) * H.stride_k
    return p_tile, (o_v < H.d_v) & (o_k < H.d_k)


@triton.jit
def load_tile(p_head, v, k, H: tl.constexpr):
    """A tile of the state in float32, with zeros beyond the head."""
    p_tile, mask = locate_tile(p_head, v, k, H)
    return tl.load(p_tile, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_rotated(p_head, v, k, H: tl.constexpr):
    """A tile of ``H D X / B``, ``[C, J, W, L]``."""
    x = load_tile(p_head, v, k, H)
    return rotate(fold(tl.where(is_finite(x), x, 0.0), H), v)


@triton.jit
def amax_of(x):
    """The largest magnitude in each channel of a tile, ``[C, 1, 1, L]``."""
    return tl.max(tl.max(tl.abs(x), 1, keep_dims=True), 2, keep_dims=True)


@triton.jit
def rotate(x, v):
    """``H D x / B``."""
    J: tl.constexpr = x.shape[1]
    x = _signed(x, v, tl.cast(1.0 / J, tl.float32))
    for i in tl.static_range(8):
        if 1 << i < J:
            x = _butterflies(x, 1 << i)
    return x


@triton.jit
def rotate_back(x, v, exponent):
    """``D H x 2^e``."""
    J: tl.constexpr = x.shape[1]
    for i in tl.static_range(7, -1, -1):
        if 1 << i < J:
            x = _butterflies(x, 1 << i)
    return _signed(x, v, power_of_two(exponent))


@triton.jit
def _signed(x, v, size):
    """``D x`` times a scalar, of a tile ``[C, J, W, L]`` of rows from ``v`` on."""
    J: tl.constexpr = x.shape[1]
    o_j = tl.arange(0, J)
    mixed = (1 + v + tl.arange(0, x.shape[2])[:, None] * J + o_j[None, :]).to(tl.uint32) * 0x9E3779B1
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B
    negative = tl.sum((mixed >> 31 << o_j[None, :]).to(tl.int32), 1)  # J bits for each w: few registers
    return x * flip(size, negative[None, None, :, None] >> o_j[None, :, None, None])


@triton.jit
def _butterflies(x, APART: tl.constexpr):
    """Between rows so far apart, of a tile ``[C, J, W, L]``."""
    pairs = tl.reshape(x, [x.shape[0], x.shape[1] // APART // 2, 2, APART, x.shape[2], x.shape[3]])
    a, b = tl.split(tl.permute(pairs, [0, 1, 3, 4, 5, 2]))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), [0, 1, 5, 2, 3, 4]), x.shape)


@triton.jit
def power_of_two(exponent):
    """``2 ** (exponent - 127)``."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def flip(x, negative):
    """``-x`` where ``negative`` is odd, else ``x``."""
    return (x.to(tl.int32, bitcast=True) ^ (negative << 31)).to(tl.float32, bitcast=True)
