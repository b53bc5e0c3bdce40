"""States with too many lossy round trips: never continued from, recomputed now and then, and stored anew."""

from __future__ import annotations

import math

import pytest
from engine_side import KvSlots, Request, make_cache
from test_lifecycle import LatePool

from mamba_checkpoint_cache import CheckpointPolicy, Duplicate, PrefixCache, Stored, Telemetry

with_and_without_kv = pytest.mark.parametrize("kv", [None, KvSlots], ids=["no kv", "kv"])


def capped(max_hops: int | None, *, kv=None, slots=64, codec="int8", **options) -> PrefixCache:
    return make_cache(slots=slots, codec=codec, kv=kv, policy=CheckpointPolicy(max_hops=max_hops, max_per_path=64), **options)


def turn(cache: PrefixCache, tokens: list[int], kv: KvSlots | None = None, *, branch: bool = True) -> tuple[int, int, str | None]:
    """A request that commits at its branch point and at its end: the depth and hops of what it found, and why no more."""
    request = Request(cache, tokens, kv)
    if branch and request.match.branch_depth:
        request.commit(request.match.branch_depth, 1.0)
    request.commit(len(tokens), 1.0)
    request.finish()
    return request.match.depth, request.match.hops, request.match.miss


def conversation(turns: int) -> list[list[int]]:
    return [list(range(4 * (i + 1))) for i in range(turns)]


@with_and_without_kv
@pytest.mark.parametrize("branch", [True, False])
@pytest.mark.parametrize("max_hops", [2, 3, 8])
def test_hops_stay_bounded_and_recomputation_is_amortised(max_hops, branch, kv):
    """Over fifty turns no restored state has as many hops as the cap; one turn in so many starts over, the others go on."""
    kv = kv and kv()
    cache = capped(max_hops, kv=kv)

    found = [turn(cache, tokens, kv, branch=branch) for tokens in conversation(50)]

    assert max(hops for _, hops, _ in found) == max_hops - 1
    for i, (depth, hops, miss) in enumerate(found):
        starts_over = i % max_hops == 0
        assert (depth, hops) == ((0, 0) if starts_over else (4 * i, i % max_hops))
        assert miss == (("hop_cap" if i else "empty") if starts_over else None)


def test_without_a_cap_hops_grow():
    """Fifty turns are forty-nine round trips: that is what the cap is for."""
    cache = capped(None)

    assert [turn(cache, tokens)[1] for tokens in conversation(50)] == list(range(50))


def test_without_a_lossy_codec_nothing_is_worn():
    """Native states have no hops: the cap never shows."""
    cache = capped(2, codec="none")

    assert [turn(cache, tokens)[2] for tokens in conversation(10)] == ["empty", *[None] * 9]


@with_and_without_kv
@pytest.mark.parametrize(("max_hops", "starts"), [(2, 2), (3, 1), (8, 0)])
def test_a_prompt_sent_again_unchanged_settles(max_hops, starts, kv):
    """Where it meets a worn state it starts over, and leaves a fresh one there: once or twice, and from then on it hits."""
    kv = kv and kv()
    cache = capped(max_hops, kv=kv)
    for tokens in conversation(max_hops if max_hops < 8 else 3):
        turn(cache, tokens, kv)
    prompt = [*tokens, 50, 51]

    found = [turn(cache, prompt, kv) for _ in range(50)]

    assert [miss for _, _, miss in found].count("hop_cap") == starts
    assert set(found[4:]) == {(len(prompt) - 1, found[4][1], None)}
    assert all(hops < max_hops for _, hops, _ in found)


@with_and_without_kv
def test_a_worn_state_gives_way_to_one_with_fewer_hops(kv):
    """In the same place of the tree, and its slot is free: one eviction, and nothing else has moved."""
    kv, telemetry = kv and kv(), Telemetry()
    cache = capped(2, kv=kv, telemetry=telemetry)
    first, second = conversation(2)
    turn(cache, first, kv)
    turn(cache, second, kv)
    before = cache.checkpoints.slots.counts

    request = Request(cache, [*second, 99], kv)
    assert (request.match.depth, request.match.branch_depth) == (0, 8)
    assert isinstance(request.commit(4, 1.0), Duplicate), "not worn: it stays"
    assert isinstance(request.commit(8, 2.0), Stored)
    request.finish()

    match = cache.match_prefix([*second, 99])
    assert (match.depth, match.hops) == (8, 1)
    cache.release(match)
    assert cache.checkpoints.slots.counts == before
    evicted = telemetry.registry.get_sample_value(
        "mamba_checkpoint_evictions_total", {"cache": "default", "pool": "checkpoint", "reason": "hop_cap", "reused": "no"}
    )
    assert evicted == 1
    cache.flush()
    assert kv is None or len(kv.free_ids) == kv.size


def worn_at_8(cache: PrefixCache) -> Request:
    """A conversation whose second turn left a worn state at 8; a request that starts over and is to commit there."""
    first, second = conversation(2)
    turn(cache, first)
    turn(cache, second)
    request = Request(cache, [*second, 99])
    assert (request.match.depth, request.match.miss) == (0, "hop_cap")
    return request


def hops_at_8(cache: PrefixCache) -> int | None:
    """The hops of the checkpoint at depth 8."""
    return next((node.checkpoint.hops for node in cache._tree.radix.nodes() if node.depth == 8 and node.checkpoint), None)


def test_a_worn_state_stays_if_the_new_one_fails():
    """A state that is not finite, or a codec that raises: the old one is where it was, and the next attempt replaces it."""
    cache = capped(2)
    request = worn_at_8(cache)
    before = cache.checkpoints.slots.counts

    assert request.commit(8, math.nan).reason == "non_finite"
    cache.check()
    compress = cache.checkpoints.compress
    cache.checkpoints.compress = lambda *args: (_ for _ in ()).throw(RuntimeError("device lost"))
    with pytest.raises(RuntimeError, match="device lost"):
        request.commit(8, 1.0)
    cache.check()
    assert hops_at_8(cache) == 2
    assert cache.checkpoints.slots.counts == before

    cache.checkpoints.compress = compress
    assert isinstance(request.commit(8, 1.0), Stored)
    cache.check()
    assert hops_at_8(cache) == 1
    assert cache.checkpoints.slots.counts == before


def test_a_worn_state_is_not_replaced_by_one_that_came_as_far():
    """A request that was restored before goes on under its own hops: that is a duplicate."""
    cache = capped(2)
    first, second = conversation(2)
    turn(cache, first)
    early = Request(cache, second)
    turn(cache, second)

    assert isinstance(early.commit(8, 1.0), Duplicate)
    assert hops_at_8(cache) == 2


def test_in_a_full_pool_a_worn_state_gives_its_slot():
    """All else is in use: the slot that is evicted for the new state is the worn one's."""
    cache = capped(2, slots=2)
    request = worn_at_8(cache)
    lock = cache.match_prefix([0, 1, 2, 3, 99])
    assert lock.depth == 4

    assert isinstance(request.commit(8, 1.0), Stored)
    cache.check()
    assert hops_at_8(cache) == 1
    assert cache.checkpoints.slots.counts == (0, 0, 1, 1)


@pytest.mark.parametrize("poison", [None, math.nan])
def test_a_replacement_may_be_pending(poison):
    """On a device the worn state goes when the new one is put in its place; if that turns out poisoned, there is none."""
    cache = capped(2, pool=LatePool)
    request = worn_at_8(cache)

    assert isinstance(request.commit(8, poison or 1.0), Stored)
    cache.check()
    assert cache.checkpoints.slots.counts.reserved == 1
    request.finish()

    match = cache.match_prefix([*range(8), 99])
    cache.check()
    assert (match.depth, match.hops) == ((4, 1) if poison else (8, 1))


def test_a_worn_state_that_is_pending_stays():
    """Its report has yet to be read, by the request's own next call: another state in its place is a duplicate."""
    cache = capped(2, pool=LatePool)
    first, second = conversation(2)
    turn(cache, first)
    request, fresh = Request(cache, second), Request(cache, [77, 78])
    assert (request.match.hops, fresh.match.hops) == (1, 0)
    assert isinstance(request.commit(8, 1.0), Stored)
    cache.active.advance(fresh.slot, depth=8)

    assert isinstance(cache.commit(second, depth=8, source=fresh.slot, lease=request.match), Duplicate)
    cache.check()


def test_a_worn_state_beyond_the_prompt_is_no_reason():
    """A prompt that ends before it is continued from what it has; one that goes through it is not."""
    cache = capped(2)
    first, second = conversation(2)
    turn(cache, first)
    turn(cache, second)

    assert cache.match_prefix(second[:6]).depth == 4
    assert cache.match_prefix(second).depth == 4
    assert (cache.match_prefix([*second, 1]).depth, cache.match_prefix([*second, 1]).miss) == (0, "hop_cap")


@pytest.mark.parametrize("max_hops", [1, 0, -1])
def test_a_cap_that_would_reuse_nothing_is_refused(max_hops):
    """Every lossy checkpoint has a hop: under two, none would ever be used."""
    with pytest.raises(ValueError, match=f"max_hops must be at least 2 .* got {max_hops}"):
        CheckpointPolicy(max_hops=max_hops)
