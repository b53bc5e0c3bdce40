from __future__ import annotations

import math

import pytest
import torch
from engine_side import CODECS, SPEC, content, fill, make_cache

from mamba_checkpoint_cache import ActivePool, CheckpointPool, HandleError, SideSpec, StateSpec
from mamba_checkpoint_cache.pools import Report


def test_pools_start_defined():
    """No uninitialised memory: a fresh pool is zeros throughout."""
    active, checkpoints = ActivePool(SPEC, 3), CheckpointPool(SPEC, 3, codec="int8")

    for tensor in (active.state, *active.side.values(), *checkpoints.stored.values(), *checkpoints.side.values()):
        assert not tensor.any()


def test_a_pool_takes_the_bytes_that_it_says():
    """(slots + 1) times the bytes per slot, as torch counts them; slots_for is the inverse."""
    for name, codec in CODECS.items():
        pool = CheckpointPool(SPEC, 7, codec=codec())
        taken = sum(t.numel() * t.element_size() for t in (*pool.stored.values(), *pool.side.values()))

        assert taken == 8 * pool.bytes_per_slot == pool.snapshot().bytes_reserved
        assert CheckpointPool.slots_for(SPEC, name, taken) == 7
        assert CheckpointPool.slots_for(SPEC, name, taken - 1) == 6


def test_adopted_tensors_are_used_where_they_lie():
    """An engine's own strided tensors: the state is read and written in place, d_v and d_k swapped in memory."""
    storage = torch.zeros(2, 5, 2, 3, 4)
    pool = ActivePool(SPEC, 4, state=storage.transpose(-1, -2), side={"conv": torch.zeros(2, 5, 5, 3, dtype=torch.bfloat16)})
    slot = pool.allocate()

    pool.state[:, slot.index] = 7

    assert storage[:, slot.index].eq(7).all()
    assert storage.sum() == 7 * 2 * 2 * 3 * 4


@pytest.mark.parametrize(
    ("state", "side", "message"),
    [
        (
            torch.zeros(2, 5, 2, 4, 3, dtype=torch.bfloat16),
            None,
            r"state: expected torch.float32 \[2, 5, 2, 4, 3\], got torch.bfloat16",
        ),
        (torch.zeros(2, 4, 2, 4, 3), None, r"state: expected .*\[2, 5, 2, 4, 3\], got .*\[2, 4, 2, 4, 3\]"),
        (None, {}, r"expected the side tensors \['conv'\] .* got \[\]"),
        (None, {"conv": torch.zeros(2, 5, 5, 3), "ngram": torch.zeros(2, 5)}, r"expected the side tensors \['conv'\]"),
        (None, {"conv": torch.zeros(2, 5, 5, 3)}, r"conv: expected torch.bfloat16"),
    ],
)
def test_tensors_that_do_not_fit_the_spec_are_refused_at_construction(state, side, message):
    """Dtype, shape, missing and unknown side tensors: told with what was expected and what was given."""
    with pytest.raises(ValueError, match=message):
        ActivePool(SPEC, 4, state=state, side=side)


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_construction_fails_early_with_the_numbers_when_memory_cannot_hold_it(codec):
    """Before anything is allocated: what it needs, what there is, how many slots would fit."""
    big = StateSpec(48, 64, 128, 128)

    with pytest.raises(
        ValueError, match=r"checkpoint pool of 1000000 slots .* needs [\d,]+ bytes .* available: \d+ slots would fit"
    ):
        CheckpointPool(big, 1_000_000, codec=codec)
    with pytest.raises(ValueError, match=r"active pool of 1000000 slots"):
        ActivePool(big, 1_000_000)


def test_a_slot_that_was_never_restored_has_no_state():
    """Reserved but unwritten: its depth, ring and hops are refused, and so is advancing it."""
    pool = ActivePool(SPEC, 2)
    slot = pool.allocate()

    for use in (pool.depth, pool.ring, pool.hops, lambda slot: pool.advance(slot, depth=1)):
        with pytest.raises(HandleError, match="never restored"):
            use(slot)


@pytest.mark.parametrize(("depth", "ring"), [(-1, 0), (3, 4), (3, -1)])
def test_a_ring_deeper_than_the_state_is_refused(depth, ring):
    """A ring holds back tokens that were run, no more."""
    cache = make_cache()
    slot = cache.active.allocate()
    cache.restore(cache.match_prefix([1, 2]), slot)

    with pytest.raises(ValueError, match="expected 0 <= ring <= depth"):
        cache.active.advance(slot, depth=depth, ring=ring)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_side_state_travels_exactly_and_in_its_own_dtype(codec, dtype):
    """Whatever the codec does to the state, conv windows and the like come back bit for bit."""
    sides = (
        SideSpec("conv", (5, 3), torch.bfloat16),
        SideSpec("ngram", (7,), torch.int64),
        SideSpec("scalar", (), torch.float32),
    )
    spec = StateSpec(3, 2, 5, 4, dtype, side=sides)
    active, checkpoints = ActivePool(spec, 2), CheckpointPool(spec, 2, codec=codec)
    source, target, slot = active.slots.reserve(), active.slots.reserve(), checkpoints.slots.reserve()
    active.state[:, source.index] = torch.randn(3, 2, 5, 4)
    for tensor in active.side.values():
        tensor[:, source.index] = torch.randint(-1000, 1000, tensor[:, source.index].shape).to(tensor.dtype)

    checkpoints.compress(active, source, slot)
    checkpoints.restore(slot, active, target)

    for tensor in active.side.values():
        assert torch.equal(tensor[:, target.index], tensor[:, source.index])


def test_the_verdict_is_the_frobenius_error_of_the_state_and_of_its_worst_head():
    """From the energies per layer and head; a state of zeros has no error."""
    energies = torch.zeros(1, 2, 2, 3, dtype=torch.float64)
    energies[0, 0, 1] = torch.tensor([4.0, 0.01, 0])
    energies[0, 1, 0] = torch.tensor([96.0, 0.0, 0])

    verdict = Report(energies).verdict()

    assert verdict.finite
    assert verdict.relative_error == pytest.approx(math.sqrt(0.01 / 100))
    assert verdict.worst_head == pytest.approx(math.sqrt(0.01 / 4))
    assert Report(torch.zeros(1, 2, 2, 3, dtype=torch.float64)).verdict().relative_error == 0
    energies[0, 1, 1, 2] = 1
    assert not Report(energies).verdict().finite


def test_the_snapshot_says_what_is_saved():
    """Occupied bytes and what the same states would take uncompressed."""
    cache = make_cache(codec="int8", slots=4)
    match, slot = cache.match_prefix([1, 2, 3]), cache.active.allocate()
    cache.restore(match, slot)
    fill(cache, slot, 2.0)
    cache.active.advance(slot, depth=2)
    cache.commit([1, 2, 3], depth=2, source=slot)

    snapshot = cache.checkpoints.snapshot()

    assert tuple(snapshot.counts) == (3, 0, 1, 0)
    assert snapshot.bytes_occupied == cache.checkpoints.bytes_per_slot < snapshot.bytes_native_equivalent == SPEC.native_bytes
    assert content(cache, slot) == 2.0
