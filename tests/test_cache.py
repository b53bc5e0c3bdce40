from __future__ import annotations

import math
from array import array

import pytest
import torch
from engine_side import SPEC, KvSlots, Request, content, make_cache, serve

from mamba_checkpoint_cache import (
    ActivePool,
    CheckpointPolicy,
    CheckpointPool,
    Duplicate,
    HandleError,
    PrefixCache,
    Skipped,
    StateSpec,
    Stored,
    Telemetry,
)


def value(telemetry: Telemetry, metric: str, **labels: str) -> float:
    return telemetry.registry.get_sample_value(f"mamba_checkpoint_{metric}", {"cache": "default", **labels}) or 0.0


def test_four_slots_through_a_day():
    """The worked example: what each call finds, stores and evicts, slot by slot."""
    kv = KvSlots()
    cache = make_cache(slots=4, kv=kv, policy=CheckpointPolicy(max_per_path=4))

    first = Request(cache, [1, 2, 3, 4, 5, 6], kv)
    assert (first.match.depth, first.match.miss) == (0, "empty")
    assert list(first.commit(4, 4.0).kv) == [1, 2, 3, 4]
    assert list(first.commit(6, 6.0).kv) == [1, 2, 3, 4, 5, 6]
    first.finish()

    again = Request(cache, [1, 2, 3, 4, 5, 6], kv)
    assert (again.match.depth, list(again.match.kv), again.match.miss) == (4, [1, 2, 3, 4], "whole_prompt")
    assert content(cache, again.slot) == 4.0
    assert isinstance(again.commit(6), Duplicate)
    assert list(again.ids) == [1, 2, 3, 4, 5, 6], "the engine goes on with the tree's KV, its own duplicates are freed"
    again.finish()

    fork = Request(cache, [1, 2, 3, 4, 5, 9, 9], kv)
    assert (fork.match.depth, fork.match.matched, fork.match.branch_depth) == (4, 5, 5)
    assert fork.match.miss == "never_checkpointed"
    assert isinstance(fork.commit(5, 5.0), Stored)
    assert isinstance(fork.commit(7, 7.5), Stored)
    fork.finish()
    assert cache.checkpoints.slots.counts == (0, 0, 4, 0)

    third = Request(cache, [1, 2, 3, 4, 5, 8, 8], kv)
    assert (third.match.depth, content(cache, third.slot)) == (5, 5.0)
    assert isinstance(third.commit(7, 7.8), Stored)
    third.finish()

    # The fifth checkpoint took the slot of the one at 6, which nobody had consumed; as a leaf it took its KV along.
    assert serve(cache, [1, 2, 3, 4, 5, 6, 7], kv=kv).depth == 5
    assert serve(cache, [1, 2, 3, 4, 7, 7], kv=kv).depth == 4
    assert kv.size - len(kv.free_ids) == 5 + 2 + 2


def test_the_same_prompt_twice_hits_the_second_time():
    """Though the last token is always run: the checkpoint below it serves."""
    cache = make_cache()
    assert serve(cache, [1, 2, 3, 4], 2, 4).depth == 0
    assert serve(cache, [1, 2, 3, 4], 4).depth == 2


def test_a_match_covers_all_but_the_last_token_at_most():
    """A checkpoint at the very end of a prompt is reported as what it is, and the way to a better one is offered."""
    cache = make_cache()
    serve(cache, [1, 2, 3, 4], 4)

    match = cache.match_prefix([1, 2, 3, 4])

    assert (match.depth, match.miss, match.branch_depth) == (0, "whole_prompt", 3)


@pytest.mark.parametrize(("codec", "expected"), [("none", [0, 0, 0, 0]), ("int8", [0, 1, 2, 3])])
def test_hops_count_the_lossy_round_trips(codec, expected):
    """Each store and restore through a lossy codec adds one, along a conversation that extends itself."""
    cache = make_cache(codec=codec)
    tokens, hops = [1], []
    for turn in range(4):
        tokens = [*tokens, turn, turn]
        hops.append(serve(cache, tokens, len(tokens) - 1).hops)

    assert hops == expected


def test_a_pure_ssm_has_no_kv_side():
    """No KV to give, none to own; nodes that lead nowhere are gone at once."""
    cache = make_cache(slots=2)
    serve(cache, [1, 2, 3], 2)
    serve(cache, [4, 5, 6], 2)
    serve(cache, [7, 8, 9], 2)

    cache.check()
    assert sum(1 for _ in cache._tree.radix.nodes()) == 2
    with pytest.raises(ValueError, match="no KV side"):
        Request(cache, [1, 2, 3], KvSlots()).commit(2, 1.0)


def test_kv_must_come_with_a_kv_side():
    """A model with attention cannot commit a state without the KV of its tokens."""
    cache = make_cache(kv=KvSlots())
    request = Request(cache, [1, 2, 3])

    with pytest.raises(ValueError, match="has a KV side: pass kv"):
        request.commit(2, 1.0)
    with pytest.raises(ValueError, match="at least 2 KV slot ids"):
        cache.commit([1, 2, 3], depth=2, source=request.slot, kv=[1])


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_depths_are_page_boundaries(page_size):
    """A state off the page grid isn't stored, though the KV up to the page before it is kept."""
    kv = KvSlots()
    cache = make_cache(kv=kv, page_size=page_size)
    request = Request(cache, list(range(11)), kv)

    result = request.commit(10, 1.0)
    request.finish()

    aligned = 10 - 10 % page_size
    assert len(result.kv) == aligned
    assert isinstance(result, Stored) if aligned == 10 else result.reason == "unaligned"
    match = cache.match_prefix(list(range(11)))
    assert match.matched == aligned
    assert match.depth == (aligned if aligned == 10 else 0)


def test_shorter_than_the_policy_wants_is_skipped():
    """A checkpoint that would save next to nothing does not cost a slot."""
    cache = make_cache(policy=CheckpointPolicy(min_tokens=4))
    request = Request(cache, [1, 2, 3, 4, 5])

    assert request.commit(3, 1.0).reason == "too_short"
    assert isinstance(request.commit(4, 1.0), Stored)


def test_a_long_path_thins_itself_out_and_leaves_the_others_alone():
    """The cap drops interior checkpoints; never the tail, a fork, or another path's."""
    cache = make_cache(slots=12, policy=CheckpointPolicy(max_per_path=4))
    serve(cache, [7, 7, 7], 2)
    serve(cache, [1] * 10 + [2, 2], 8, 10, 11)
    serve(cache, [1] * 10 + [3] * 20, *range(12, 30, 2))

    depths = sorted(
        node.depth for node in cache._tree.radix.nodes() if node.checkpoint and node.key[:4] != array("i", [2]).tobytes()
    )
    assert 28 in depths, "the tail stays"
    assert 10 in depths, "the fork stays"
    assert serve(cache, [7, 7, 7]).depth == 2
    assert len(depths) == 4 + 1


@pytest.mark.parametrize(("slots", "length"), [(3, 500), (8, 200), (64, 3000)])
def test_a_prompt_longer_than_the_cap_still_hits_its_last_boundary(slots, length):
    """Sent twice, a prompt finds the chunk end just below it, however many chunk ends were thinned out."""
    cache = make_cache(slots=slots)
    tokens = list(range(length))
    serve(cache, tokens, *range(16, length, 16), length)

    assert cache.match_prefix(tokens).depth == (length - 1) // 16 * 16


def test_donated_slots_are_freed_whatever_the_outcome():
    """Stored, duplicate or skipped: the handed-over slot is the cache's to free, once."""
    cache = make_cache(active=1)
    for expected in (Stored, Duplicate, Skipped):
        request = Request(cache, [1, 2])
        depth = 1 if expected is not Skipped else 2
        if expected is Skipped:
            cache.active.advance(request.slot, depth=1)
            result = cache.commit([1, 2], depth=depth, source=request.slot, donate=True)
        else:
            result = request.commit(depth, 1.0, donate=True)
        assert isinstance(result, expected)
        with pytest.raises(HandleError, match="freed already"):
            cache.active.free(request.slot)
        request.finish(donated=True)
        assert cache.active.slots.counts == (1, 0, 0, 0)


def test_a_lease_keeps_its_path_from_kv_pressure():
    """What a running request stands on is not evicted under it; what it left is."""
    kv = KvSlots()
    cache = make_cache(kv=kv)
    serve(cache, [1, 2, 3, 4], 3, kv=kv)
    serve(cache, [9, 9, 9, 9], 3, kv=kv)
    match = cache.match_prefix([1, 2, 3, 4])

    assert cache.evict_kv(100) == 3
    cache.check()
    assert serve(cache, [1, 2, 3, 9], kv=kv).depth == 3
    cache.release(match)
    assert cache.evict_kv(1) == 3
    assert len(kv.free_ids) == kv.size


def test_a_lease_moves_to_what_was_committed():
    """A running request goes on under the lease of its last commit, and only that is kept."""
    kv = KvSlots()
    cache = make_cache(slots=1, kv=kv)
    request = Request(cache, [1, 2, 3, 4, 5, 6], kv)
    request.commit(2, 2.0)
    request.commit(5, 5.0)

    assert cache.evict_kv(100) == 0
    cache.check()
    request.finish()
    assert cache.evict_kv(100) == 5


def test_one_restore_per_lease():
    """The checkpoint may be evicted once its copy is on the stream, so a second restore is refused."""
    cache = make_cache()
    serve(cache, [1, 2, 3], 2)
    request = Request(cache, [1, 2, 3])

    assert cache.checkpoints.slots.counts.locked == 0
    with pytest.raises(HandleError, match="restored already"):
        cache.restore(request.match, request.slot)


def test_a_miss_starts_from_the_state_of_an_empty_sequence():
    """Nothing of whoever had the slot before is left in it."""
    cache = make_cache(active=1)
    serve(cache, [1, 2, 3], 2, value=7.0)

    request = Request(cache, [9, 9])

    assert (content(cache, request.slot), cache.active.depth(request.slot)) == (0.0, 0)


def test_a_released_or_foreign_lease_is_refused():
    """By every call that takes one, and nothing changes."""
    cache, other = make_cache(), make_cache()
    request = Request(cache, [1, 2, 3])
    foreign = other.match_prefix([1, 2, 3])
    cache.release(request.match)

    for lease in (request.match, foreign):
        with pytest.raises(HandleError, match="expected a live lease of this cache"):
            cache.release(lease)
        with pytest.raises(HandleError, match="expected a live lease of this cache"):
            cache.restore(lease, request.slot)
        with pytest.raises(HandleError, match="expected a live lease of this cache"):
            cache.commit([1, 2], depth=1, source=request.slot, lease=lease)
    cache.check()


def test_the_ring_names_the_checkpoint_by_the_true_depth_of_the_state():
    """ReplaySSM: four tokens run, two of them in the state; restored into the very same slot, the ring is empty."""
    cache = make_cache(active=1)
    request = Request(cache, [1, 2, 3, 4, 5])
    cache.active.advance(request.slot, depth=4, ring=2)
    result = cache.commit(request.tokens, depth=4, source=request.slot, lease=request.match)
    request.finish()

    assert (type(result), result.depth) == (Stored, 2)
    again = Request(cache, [1, 2, 3, 4, 5])
    assert (again.match.depth, cache.active.depth(again.slot), cache.active.ring(again.slot)) == (2, 2, 0)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_state_that_is_not_finite_never_becomes_matchable(codec, poison):
    """Not the state, and not the KV that the same forward wrote."""
    kv = KvSlots()
    cache = make_cache(codec=codec, kv=kv)
    request = Request(cache, [1, 2, 3, 4], kv)
    cache.active.state[1, request.slot.index, 0, 2, 1] = poison

    assert request.commit(3).reason == "non_finite"
    request.finish()

    assert cache.checkpoints.slots.counts == (4, 0, 0, 0)
    assert len(kv.free_ids) == kv.size
    assert cache.match_prefix([1, 2, 3, 4]).matched == 0


def test_all_ranks_must_find_the_state_finite():
    """A fact that only one rank can see goes through the engine's agreement."""
    asked = []
    cache = make_cache(agree=lambda finite: asked.append(finite) or False)

    assert Request(cache, [1, 2, 3]).commit(2, 1.0).reason == "non_finite"
    assert asked == [True]


def test_a_codec_that_fails_leaves_nothing_behind():
    """The reservation is undone, and the error reaches the engine."""
    cache = make_cache()
    request = Request(cache, [1, 2, 3])
    cache.checkpoints.compress = lambda *args: (_ for _ in ()).throw(RuntimeError("device lost"))

    with pytest.raises(RuntimeError, match="device lost"):
        request.commit(2, 1.0)
    cache.check()
    assert cache.checkpoints.slots.counts == (4, 0, 0, 0)
    request.finish()


def test_a_restore_that_fails_leaves_the_slot_undefined():
    """Half a state must not be committed."""
    cache = make_cache()
    serve(cache, [1, 2, 3], 2)
    match, slot = cache.match_prefix([1, 2, 3]), cache.active.allocate()
    cache.restore(cache.match_prefix([9, 9]), slot)
    cache.checkpoints.restore = lambda *args: (_ for _ in ()).throw(RuntimeError("device lost"))

    with pytest.raises(RuntimeError, match="device lost"):
        cache.restore(match, slot)
    with pytest.raises(HandleError, match="never restored"):
        cache.commit([1, 2, 3], depth=2, source=slot)
    cache.release(match)
    cache.check()


def test_a_flush_frees_all_that_nobody_uses():
    """What a lease keeps stays; the rest is gone, and its KV is back with the engine."""
    kv = KvSlots()
    cache = make_cache(kv=kv)
    serve(cache, [1, 2, 3, 4], 2, 3, kv=kv)
    serve(cache, [5, 6, 7], 2, kv=kv)
    match = cache.match_prefix([1, 2, 9])

    flushed = cache.flush()

    cache.check()
    assert (flushed.checkpoints, flushed.kv_tokens) == (2, 3)
    assert cache.match_prefix([1, 2, 8]).depth == match.depth == 2
    assert len(kv.free_ids) == kv.size - 2


@pytest.mark.parametrize(
    ("prompts", "probe", "depth", "miss"),
    [
        ([], [1, 2], 0, "empty"),
        ([], [1], 0, "too_short"),
        ([[1, 2, 3]], [4, 4], 0, "no_shared_prefix"),
        ([[1, 2, 3]], [1, 2, 3], 2, None),
        ([[1, 2, 3]], [1, 2, 9, 9], 2, None),
        ([[1, 2, 3]], [1, 9], 0, "never_checkpointed"),
        ([[1, 2, 3]], [1, 2], 0, "whole_prompt"),
        ([[1, 2, 3], [4, 4, 4], [5, 5, 5]], [1, 2, 3], 0, "evicted"),
    ],
)
def test_a_miss_says_why(prompts, probe, depth, miss):
    """Each reason, on a pool of two; none where nothing stood in the way."""
    telemetry = Telemetry()
    cache = make_cache(slots=2, telemetry=telemetry)
    for prompt in prompts:
        serve(cache, prompt, 2)
    before = {
        reason: value(telemetry, "misses_total", reason=reason) for reason in ("evicted", "whole_prompt", "too_short", "empty")
    }

    match = cache.match_prefix(probe)

    assert (match.depth, match.miss) == (depth, miss)
    for reason, count in before.items():
        assert value(telemetry, "misses_total", reason=reason) == count + (reason == miss)


def test_an_evicted_interior_checkpoint_is_a_reason_too():
    """The nearest surviving ancestor serves, and the tokens lost are counted."""
    kv, telemetry = KvSlots(), Telemetry()
    cache = make_cache(slots=4, kv=kv, telemetry=telemetry, policy=CheckpointPolicy(max_per_path=4))
    serve(cache, [1] * 9, 2, 6, kv=kv)
    serve(cache, [1] * 6 + [2, 2, 2], 8, kv=kv)
    serve(cache, [1] * 6 + [3, 3, 3], 8, kv=kv)
    for node in list(cache._tree.radix.nodes()):
        if node.depth == 6:
            cache._lifecycle.evict(node, "path_cap")
    before = value(telemetry, "tokens_total", kind="lost")

    match = cache.match_prefix([1] * 6 + [4, 4])

    assert (match.depth, match.matched, match.miss) == (2, 6, "evicted")
    assert value(telemetry, "tokens_total", kind="lost") - before == 4
    cache.check()


def test_pools_of_different_states_are_refused():
    """Another dtype or layout under one tree would serve garbage."""
    other = StateSpec(2, 2, 4, 3, torch.bfloat16, side=SPEC.side)

    with pytest.raises(ValueError, match="the pools hold different states"):
        PrefixCache(active=ActivePool(SPEC, 1), checkpoints=CheckpointPool(other, 1))


def test_depth_beyond_the_tokens_is_refused():
    """A depth is a number of the tokens given."""
    cache = make_cache()
    request = Request(cache, [1, 2])
    for depth in (3, -1):
        with pytest.raises(ValueError, match="expected 0 <= depth <= 2"):
            cache.commit([1, 2], depth=depth, source=request.slot)
