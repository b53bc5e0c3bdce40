"""The Triton kernels of the pivot formats (pivot.py), each one launch for every layer and head of every slot.

What is stored is the reference's bit for bit, but where a sum in another order moves a gain to the next code, or changes
the sign of a gain of 0.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# ruff: noqa: N803, PLR0915

import triton
import triton.language as tl

from mamba_checkpoint_cache.codec.gpu_kernels import ROUND, UNALIGNED, UNSPECIALIZED, is_finite, locate
from mamba_checkpoint_cache.codec.gpu_pivot_fields import (
    load_pivot,
    load_restored,
    locate_stored,
    store_gains,
    store_pivot,
    store_q,
    store_scales,
)
from mamba_checkpoint_cache.codec.gpu_pivot_tiles import (
    amax_of,
    channels_of,
    load_rotated,
    load_tile,
    locate_tile,
    power_of_two,
    unfold,
)


@triton.jit
def _find_pivot(p_head, H: tl.constexpr):
    """The largest magnitude of ``R`` and the first channel that has it, in more than one tile."""
    largest = tl.cast(0.0, tl.float32)
    i_pivot = tl.cast(0, tl.int32)
    for k in range(0, H.d_k, H.block_k):
        o_k = channels_of(k, H)
        amax = tl.zeros(o_k.shape, tl.float32)
        for v in range(0, H.d_v, H.block_v):
            amax = tl.maximum(amax, amax_of(load_rotated(p_head, v, k, H)))
        most = tl.max(amax)
        i_pivot = tl.where(most > largest, tl.min(tl.where(amax == most, o_k, H.d_k)), i_pivot)
        largest = tl.maximum(most, largest)
    return largest, i_pivot


@triton.jit(noinline=True)
def _measure(p_head, stored, exponent, unit, H: tl.constexpr):
    """The report of a stored head that has elements which are not finite."""
    signal = tl.cast(0.0, tl.float32)
    error = tl.cast(0.0, tl.float32)
    non_finite = tl.cast(0, tl.int32)
    for k in range(0, H.d_k, H.block_k):
        for v in range(0, H.d_v, H.block_v):
            y = load_restored(stored, exponent, v, k, p_head.dtype.element_ty, H)
            x = load_tile(p_head, v, k, H)
            clean = tl.where(is_finite(x), x, 0.0)
            s = clean * unit
            e = (clean - y.to(tl.float32)) * unit
            signal += tl.sum(s * s)
            error += tl.sum(e * e)
            non_finite += tl.sum(tl.where(is_finite(x), 0, 1))
    return signal, error, non_finite


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def pivot_compress_kernel(
    p_state, p_q, p_high, p_exponent, p_pivot, p_gain, p_scale, p_report,
    p_state_rows, p_stored_rows, state_row, stored_row, num_stored_rows, stride_layer, stride_row, stride_head,
    NUM_LAYERS: tl.constexpr, NUM_HEADS: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Compress and measure one head."""
    o_head, i_stored = locate(
        p_state_rows, p_stored_rows, state_row, stored_row, num_stored_rows, stride_layer, stride_row, stride_head,
        NUM_LAYERS, NUM_HEADS,
    )  # fmt: skip
    p_head = p_state + o_head
    stored = locate_stored(i_stored, p_q, p_high, p_exponent, p_pivot, p_gain, p_scale, H)

    if H.is_one_tile:
        r = load_rotated(p_head, 0, 0, H)
        amax = amax_of(r)
        largest = tl.max(amax)
        i_pivot = tl.min(tl.where(amax == largest, channels_of(0, H), H.d_k))
    else:
        largest, i_pivot = _find_pivot(p_head, H)
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 1), 253)
    unit = power_of_two(254 - exponent)
    tl.store(stored.exponent, exponent.to(tl.uint8))
    uu = store_pivot(stored, p_head + i_pivot.to(tl.int64) * H.stride_k, unit, H)
    tl.debug_barrier()  # every thread reads what others have stored
    if H.is_one_tile:
        r *= unit
        u = load_pivot(stored, 0, H)

    signal = tl.cast(0.0, tl.float32)
    error = tl.cast(0.0, tl.float32)
    for k in range(0, H.d_k, H.block_k):
        o_k = channels_of(k, H)
        total = tl.zeros(o_k.shape, tl.float32)
        for v in range(0, H.d_v, H.block_v):
            if not H.is_one_tile:
                r, u = load_rotated(p_head, v, k, H) * unit, load_pivot(stored, v, H)
            total += tl.sum(tl.sum(r * u, 1, keep_dims=True), 2, keep_dims=True)
        gain = tl.div_rn(total, tl.full(o_k.shape, 1.0, tl.float32) * uu)
        gain = store_gains(stored, gain, k, H)

        amax = tl.zeros(o_k.shape, tl.float32)
        for v in range(0, H.d_v, H.block_v):
            if not H.is_one_tile:
                r, u = load_rotated(p_head, v, k, H) * unit, load_pivot(stored, v, H)
            amax = tl.maximum(amax, amax_of(r - u * gain))
        scale = store_scales(stored, tl.div_rn(amax, tl.full(o_k.shape, H.levels, tl.float32)), k, H)
        inverse = tl.div_rn(tl.full(o_k.shape, 1.0, tl.float32), scale)

        for v in range(0, H.d_v, H.block_v):
            if not H.is_one_tile:
                r, u = load_rotated(p_head, v, k, H) * unit, load_pivot(stored, v, H)
            rounded = (r - u * gain) * inverse + ROUND
            store_q(stored, unfold(rounded.to(tl.int32, bitcast=True).to(tl.int8), H), v, k, H)
            tl.debug_barrier()
            y = load_restored(stored, exponent, v, k, p_state.dtype.element_ty, H).to(tl.float32)
            x = load_tile(p_head, v, k, H)
            s = x * unit
            e = (x - y) * unit
            signal += tl.sum(s * s)
            error += tl.sum(e * e)

    non_finite = tl.cast(0, tl.int32)
    if not signal < float("inf"):
        tl.debug_barrier()
        signal, error, non_finite = _measure(p_head, stored, exponent, unit, H.in_small_tiles)
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
    o_head, i_stored = locate(
        p_state_rows, p_stored_rows, state_row, stored_row, num_stored_rows, stride_layer, stride_row, stride_head,
        NUM_LAYERS, NUM_HEADS,
    )  # fmt: skip
    stored = locate_stored(i_stored, p_q, p_high, p_exponent, p_pivot, p_gain, p_scale, H)
    k, v = tl.program_id(1) * H.block_k, tl.program_id(2) * H.block_v
    exponent = tl.load(stored.exponent).to(tl.int32)
    y = load_restored(stored, exponent, v, k, p_state.dtype.element_ty, H)
    p_tile, mask = locate_tile(p_state + o_head, v, k, H)
    tl.store(p_tile, y, mask=mask)
