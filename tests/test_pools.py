from __future__ import annotations

import itertools
import math

import pytest
import torch
from engine_side import CODECS, SPEC, content, fill, make_cache

from mamba_checkpoint_cache import ActivePool, CheckpointPool, HandleError, SideSpec, StateSpec
from mamba_checkpoint_cache.arena import Arena
from mamba_checkpoint_cache.codec.report import Report
from mamba_checkpoint_cache.pools import MOST_TENSORS


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


def test_the_verdict_is_the_frobenius_error_of_the_state_of_its_worst_head_and_of_each_layer():
    """From the energies per layer and head; a state of zeros has no error, and an error in zeros is infinitely large."""
    energies = torch.zeros(1, 2, 2, 3, dtype=torch.float64)
    energies[0, 0, 1] = torch.tensor([4.0, 0.01, 0])
    energies[0, 1, 0] = torch.tensor([96.0, 0.0, 0])

    verdict = Report(energies).verdict()

    assert verdict.finite
    assert verdict.relative_error == pytest.approx(math.sqrt(0.01 / 100))
    assert verdict.worst_head == pytest.approx(math.sqrt(0.01 / 4))
    assert verdict.layer_errors == pytest.approx((math.sqrt(0.01 / 4), 0.0))
    assert Report(torch.zeros(1, 2, 2, 3, dtype=torch.float64)).verdict().relative_error == 0
    energies[0, 1, 1, 2] = 1
    assert not Report(energies).verdict().finite
    energies[0, 1, :, 0], energies[0, 1, 1, 1] = 0.0, 1.0
    assert Report(energies).verdict().layer_errors[1] == math.inf


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


RAGGED = StateSpec(
    3,
    2,
    5,
    7,
    torch.bfloat16,
    side=(SideSpec("conv", (3, 1)), SideSpec("ids", (2,), torch.int64), SideSpec("on", (), torch.bool)),
)


def tensors_of(pool: CheckpointPool) -> list[torch.Tensor]:
    return [*pool.stored.values(), *pool.side.values()]


def span(tensor: torch.Tensor) -> range:
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())


@pytest.mark.parametrize("spec", [SPEC, RAGGED])
def test_the_tensors_of_a_pool_share_one_aligned_block(spec):
    """One allocation, in which they lie apart and aligned; it has a few kilobytes more than they take."""
    pool = CheckpointPool(spec, 5, codec=CODECS["int8"]())
    tensors = tensors_of(pool)

    spans = sorted(map(span, tensors), key=lambda span: span.start)
    assert all(before.stop <= after.start for before, after in itertools.pairwise(spans))
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert all((tensor.data_ptr() - spans[0].start) % 128 == 0 and tensor.is_contiguous() for tensor in tensors)
    assert tensors[0].untyped_storage().nbytes() - 6 * pool.bytes_per_slot == 128 * MOST_TENSORS == 8192


@pytest.mark.parametrize("spec", [SPEC, RAGGED])
@pytest.mark.parametrize("slots", [3, 4, 5, 11, 100])
def test_a_pool_is_laid_out_anew_in_the_memory_that_it_has(spec, slots):
    """Native and back: as many slots as such memory holds, the figures that torch counts, zeros, and not one byte more."""
    pool = CheckpointPool(spec, slots, codec=CODECS["int8"]())
    memory, block = (slots + 1) * pool.bytes_per_slot, tensors_of(pool)[0].untyped_storage()
    before = pool.bytes_per_slot, pool.fingerprint
    for codec in ("none", "int8"):
        for tensor in tensors_of(pool):
            tensor.view(torch.uint8).fill_(255)

        expected = CheckpointPool.slots_for(spec, codec, memory)
        assert pool.slots_in_place(codec) == expected
        pool.relayout(CODECS[codec]())

        taken = sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(pool))
        assert pool.slots.capacity == expected
        assert taken == (expected + 1) * pool.bytes_per_slot == pool.snapshot().bytes_reserved <= memory
        assert pool.bytes_per_slot == CheckpointPool.bytes_per_slot_for(spec, codec)
        assert pool.fingerprint == f"{spec.fingerprint}-{codec}"
        assert not any(tensor.any() for tensor in tensors_of(pool))
        assert {tensor.untyped_storage().data_ptr() for tensor in tensors_of(pool)} == {block.data_ptr()}
        assert all(span(tensor).stop <= block.data_ptr() + block.nbytes() for tensor in tensors_of(pool))
        snapshot = pool.snapshot()
        assert (snapshot.capacity, sum(snapshot.counts)) == (expected, expected)
    assert (pool.slots.capacity, pool.bytes_per_slot, pool.fingerprint) == (slots, *before)


def test_a_pool_works_in_each_layout():
    """What is stored after a change of layout comes back: exactly without a codec, nearly with int8; old handles are refused."""
    active, pool = ActivePool(RAGGED, 2), CheckpointPool(RAGGED, 9, codec="int8")
    source, target = active.slots.reserve(), active.slots.reserve()
    active.state[:, source.index] = torch.randn(RAGGED.shape).bfloat16()
    active.side["ids"][:, source.index] = torch.arange(6).view(3, 2)
    old = None
    for codec, bound in (("int8", 0.02), ("none", 0.0), ("int8", 0.02)):
        pool.relayout(codec)
        slots = [pool.slots.reserve() for _ in range(pool.slots.capacity)]
        for slot in slots:
            pool.compress(active, source, slot)
            pool.restore(slot, active, target)

            expected = active.state[:, source.index]
            assert (active.state[:, target.index] - expected).float().norm() <= bound * expected.float().norm()
            assert torch.equal(active.side["ids"][:, target.index], active.side["ids"][:, source.index])
            pool.slots.free(slot)
        if old is not None:
            with pytest.raises(HandleError, match="freed already"):
                pool.slots.state(old)
        old = slots[-1]


def test_a_scrape_in_the_middle_of_a_change_of_layout_adds_up():
    """Another thread may look between any two steps: the capacity that it reads is what its four counts add up to."""
    pool = CheckpointPool(SPEC, 5, codec=CODECS["int8"]())
    pool.slots.capacity = 2  # the counts follow in the next step

    snapshot = pool.snapshot()

    assert snapshot.capacity == sum(snapshot.counts) == 5


def test_an_arena_gives_no_more_than_it_has():
    """Tensors that end within it, alignment counted, are carved; one row more is refused with the numbers."""
    arena = Arena(64, 2, torch.device("cpu"))
    templates = [torch.empty(1, 0, 4), torch.empty(1, 0, 1, dtype=torch.int64)]

    first, second = arena.carve(templates, 8)

    assert (first.shape, second.shape) == ((1, 8, 4), (1, 8, 1))
    with pytest.raises(ValueError, match="24 rows need 384 bytes and more, but the arena has 320"):
        arena.carve(templates, 24)


def test_a_pool_in_use_or_too_small_is_not_laid_out_anew():
    """With a slot handed out, or without room for one native state, it stays as it is and says why."""
    pool = CheckpointPool(SPEC, 1, codec=CODECS["int8"]())
    assert pool.slots_in_place("none") < 1
    with pytest.raises(ValueError, match="needs at least 1 slot"):
        pool.relayout("none")
    slot = pool.slots.reserve()
    with pytest.raises(HandleError, match="while slots are in use"):
        pool.relayout("int8")

    assert pool.codec.name == "int8"
    pool.slots.free(slot)
    pool.relayout("int8")
    assert pool.slots.counts == (1, 0, 0, 0)
