"""The Triton kernels of gpu.py, each one launch for every layer and head of every slot.

``p_`` is a pointer, ``o_`` are offsets, ``m_`` is a mask, ``i_`` an index; the compiler knows what is in capitals. The results
are those of reference.py, bit for bit if no multiply-adds are fused: those round once where the reference rounds twice.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import triton
import triton.language as tl

ROUND = tl.constexpr(12582912.0)
"""1.5 * 2**23: adding it rounds to an integer, half to even, and leaves that in the low bits."""

UNSPECIALIZED, UNALIGNED = ("state_row", "stored_row"), ("p_state_rows", "p_stored_rows")
"""What differs from call to call must not make Triton compile anew."""


@triton.jit
def locate(
    p_state_rows, p_stored_rows, state_row, stored_row, num_stored_rows, stride_layer, stride_row, stride_head,
    NUM_LAYERS: tl.constexpr, NUM_HEADS: tl.constexpr,
):  # fmt: skip
    """The head that this program works on: its offset in the state, and its number among the stored heads."""
    i_task = tl.program_id(0)
    if p_state_rows is None:
        i_state, i_stored = tl.cast(state_row, tl.int64), tl.cast(stored_row, tl.int64)
    else:
        i_slot = i_task // NUM_HEADS // NUM_LAYERS
        i_state, i_stored = tl.load(p_state_rows + i_slot), tl.load(p_stored_rows + i_slot)
    i_layer = (i_task // NUM_HEADS % NUM_LAYERS).to(tl.int64)
    i_head = (i_task % NUM_HEADS).to(tl.int64)
    o_head = i_layer * stride_layer + i_state * stride_row + i_head * stride_head
    return o_head, (i_layer * num_stored_rows + i_stored) * NUM_HEADS + i_head


@triton.jit
def is_finite(x):
    """Whether elements are neither NaN nor infinite."""
    return tl.abs(x) < float("inf")


@triton.jit
def _load_finite(p_x, mask):
    """A tile in float32, with zeros for what is not finite, and the number of those."""
    x = tl.load(p_x, mask=mask, other=0.0).to(tl.float32)
    finite = is_finite(x)
    return tl.where(finite, x, 0.0), tl.sum(tl.where(finite, 0, 1))


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def compress_kernel(
    p_state, p_q, p_scale, p_report, p_state_rows, p_stored_rows, state_row, stored_row, num_stored_rows,
    stride_layer, stride_row, stride_head, stride_v, stride_k,
    NUM_LAYERS: tl.constexpr, NUM_HEADS: tl.constexpr, D_V: tl.constexpr, D_K: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, MIN_AMAX: tl.constexpr, LARGEST_SCALE: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Compress and measure BLOCK_K channels of one head; without ``p_q``, only measure them."""
    o_head, i_stored = locate(
        p_state_rows, p_stored_rows, state_row, stored_row, num_stored_rows, stride_layer, stride_row, stride_head,
        NUM_LAYERS, NUM_HEADS,
    )  # fmt: skip
    o_v = tl.arange(0, BLOCK_V).to(tl.int64)[:, None]
    o_k = (tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)).to(tl.int64)
    m_k = o_k < D_K
    p_k = p_state + o_head + o_k[None, :] * stride_k

    x, non_finite = _load_finite(p_k + o_v * stride_v, (o_v < D_V) & m_k[None, :])
    amax = tl.max(tl.abs(x), 0)
    for v in range(BLOCK_V, D_V, BLOCK_V):
        x, more = _load_finite(p_k + (v + o_v) * stride_v, (v + o_v < D_V) & m_k[None, :])
        non_finite += more
        amax = tl.maximum(amax, tl.max(tl.abs(x), 0))

    # A power of two that brings the block near 1, so that sums of squares stay within float32.
    exponent = tl.max(amax, 0).to(tl.int32, bitcast=True) >> 23
    unit = ((254 - tl.minimum(exponent, 253)) << 23).to(tl.float32, bitcast=True)
    scale = tl.div_rn(tl.maximum(amax, MIN_AMAX), tl.full([BLOCK_K], LEVELS, tl.float32))
    if p_q is not None:
        scale = tl.minimum(scale.to(p_scale.dtype.element_ty).to(tl.float32), LARGEST_SCALE)
        tl.store(p_scale + i_stored * D_K + o_k, scale.to(p_scale.dtype.element_ty), mask=m_k)

    signal = tl.cast(0.0, tl.float64)
    error = tl.cast(0.0, tl.float64)
    for v in range(0, D_V, BLOCK_V):
        m_tile = (v + o_v < D_V) & m_k[None, :]
        if D_V > BLOCK_V:
            x, _ = _load_finite(p_k + (v + o_v) * stride_v, m_tile)
        s = x * unit
        signal += tl.sum(s * s).to(tl.float64)
        if p_q is not None:
            y = tl.div_rn(x, tl.broadcast_to(scale[None, :], [BLOCK_V, BLOCK_K]))
            rounded = tl.minimum(tl.maximum(y, -LEVELS), LEVELS) + ROUND
            restored = ((rounded - ROUND) * scale[None, :]).to(p_state.dtype.element_ty).to(tl.float32)
            e = (x - restored) * unit
            error += tl.sum(e * e).to(tl.float64)
            p_tile = p_q + (i_stored * D_V + v + o_v) * D_K + o_k[None, :]
            tl.store(p_tile, rounded.to(tl.int32, bitcast=True).to(p_q.dtype.element_ty), mask=m_tile)

    square = unit.to(tl.float64) * unit.to(tl.float64)
    p_out = p_report + (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * 3
    tl.store(p_out, signal / square)
    tl.store(p_out + 1, error / square)
    tl.store(p_out + 2, non_finite.to(tl.float64))


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def restore_kernel(
    p_state, p_q, p_scale, p_state_rows, p_stored_rows, state_row, stored_row, num_stored_rows,
    stride_layer, stride_row, stride_head, stride_v, stride_k,
    NUM_LAYERS: tl.constexpr, NUM_HEADS: tl.constexpr, D_V: tl.constexpr, D_K: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Decompress one tile of one head."""
    o_head, i_stored = locate(
        p_state_rows, p_stored_rows, state_row, stored_row, num_stored_rows, stride_layer, stride_row, stride_head,
        NUM_LAYERS, NUM_HEADS,
    )  # fmt: skip
    o_k = (tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)).to(tl.int64)
    o_v = (tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)).to(tl.int64)[:, None]
    m_k = o_k < D_K
    mask = (o_v < D_V) & m_k[None, :]
    q = tl.load(p_q + (i_stored * D_V + o_v) * D_K + o_k[None, :], mask=mask, other=0)
    scale = tl.load(p_scale + i_stored * D_K + o_k, mask=m_k, other=0.0).to(tl.float32)
    x = q.to(tl.float32) * scale[None, :]
    tl.store(p_state + o_head + o_v * stride_v + o_k[None, :] * stride_k, x.to(p_state.dtype.element_ty), mask=mask)
