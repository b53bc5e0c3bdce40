from __future__ import annotations

import math

import pytest
from engine_side import KvSlots, Request, make_cache, serve

from mamba_checkpoint_cache import CheckpointPolicy, CheckpointPool, Stored
from mamba_checkpoint_cache.codec.report import Report
from mamba_checkpoint_cache.lifecycle import MAX_PENDING


class LateReport(Report):
    """A report that is still on its way from a device, as on a GPU; counts how often somebody waited for it."""

    waits = 0

    @property
    def deferred(self) -> bool:
        return True

    def verdict(self):
        LateReport.waits += 1
        return super().verdict()


class LatePool(CheckpointPool):
    def compress(self, *args):
        return LateReport(super().compress(*args)._energies)


@pytest.fixture(autouse=True)
def _no_waits():
    LateReport.waits = 0


def late_cache(**options):
    return make_cache(pool=LatePool, policy=CheckpointPolicy(max_per_path=100), **options)


def poisoned(request: Request, depth: int):
    request.cache.active.state[0, request.slot.index, 1, 1, 1] = math.nan
    return request.commit(depth)


def test_a_commit_does_not_wait_for_its_report():
    """No host sync on the serving path: the slot stays reserved until a decision needs the verdict."""
    cache = late_cache()
    request = Request(cache, [1, 2, 3, 4])

    assert isinstance(request.commit(2, 1.0), Stored)
    assert isinstance(request.commit(3, 1.0), Stored)
    request.finish()

    assert LateReport.waits == 0
    assert cache.checkpoints.slots.counts == (2, 2, 0, 0)


def test_a_match_waits_for_what_it_meets_and_no_more():
    """One event: that of the checkpoints on its own path."""
    cache = late_cache()
    serve(cache, [1, 2, 3], 2)
    serve(cache, [4, 5, 6], 2)

    assert cache.match_prefix([1, 2, 9]).depth == 2
    assert LateReport.waits == 1
    assert cache.checkpoints.slots.counts == (2, 1, 0, 1)


def test_late_reports_lead_to_the_same_decisions_as_prompt_ones():
    """Timing never changes a decision: the same calls on both kinds of pool, the same hits."""
    prompts = [[a, b, c, 7, a] for a in range(3) for b in range(2) for c in range(2)] * 3
    hits = []
    for pool in (CheckpointPool, LatePool):
        kv = KvSlots()
        cache = make_cache(slots=5, kv=kv, pool=pool)
        hits.append([serve(cache, prompt, 2, 4, kv=kv).depth for prompt in prompts])

    assert hits[0] == hits[1]
    assert 0 < sum(map(bool, hits[0])) < len(prompts)


@pytest.mark.parametrize("has_kv", [True, False])
def test_a_poisoned_state_is_dropped_before_a_match_can_see_it(has_kv):
    """And with it the KV that the same forward wrote; what was there before stays."""
    kv = KvSlots() if has_kv else None
    cache = late_cache(kv=kv)
    serve(cache, [1, 2, 3, 4, 5], 2, kv=kv)
    request = Request(cache, [1, 2, 3, 4, 5], kv)
    assert isinstance(poisoned(request, 4), Stored)
    request.finish()

    match = cache.match_prefix([1, 2, 3, 4, 5])

    assert (match.depth, match.matched) == (2, 2)
    cache.release(match)
    cache.check()
    cache.flush()
    assert cache.checkpoints.slots.counts.free == 4
    assert not has_kv or len(kv.free_ids) == kv.size


def test_what_relies_on_poisoned_kv_goes_too():
    """A later state of the same request looks finite, but continues KV that is not: neither is served."""
    kv = KvSlots()
    cache = late_cache(kv=kv)
    request = Request(cache, [1, 2, 3, 4, 5], kv)
    poisoned(request, 3)
    assert isinstance(request.commit(4, 1.0), Stored)

    match = cache.match_prefix([1, 2, 3, 4, 9])

    assert (match.depth, match.matched) == (0, 0)
    cache.check()
    request.finish()
    assert len(kv.free_ids) == kv.size
    assert cache.checkpoints.slots.counts == (4, 0, 0, 0)


def test_poison_that_nobody_stands_on_is_gone_at_once():
    """Two nodes in a row, no lease: each gives its KV back once."""
    kv = KvSlots()
    cache = late_cache(kv=kv)
    request = Request(cache, [1, 2, 3], kv)
    poisoned(request, 1)
    request.commit(2, 1.0)
    request.finish()

    assert cache.match_prefix([1, 2, 3]).matched == 0
    cache.check()
    assert len(kv.free_ids) == kv.size


def test_kv_slots_that_came_out_of_quarantine_are_as_good_as_any():
    """Once the poisoned run has ended its ids are free again: who is given them next is stored."""
    kv = KvSlots()
    cache = late_cache(kv=kv)
    request = Request(cache, [1, 2, 3, 4], kv)
    poisoned(request, 3)
    assert cache.match_prefix([1, 2, 3, 4]).depth == 0
    request.finish()

    again = Request(cache, [1, 2, 3, 4], kv)

    assert list(again.ids) == list(request.ids)
    assert isinstance(again.commit(3, 1.0), Stored)
    again.finish()


def test_a_commit_without_the_lease_takes_no_quarantined_kv():
    """The request's own KV is the tree's already, and poisoned: it cannot be brought in a second time."""
    kv = KvSlots()
    cache = late_cache(kv=kv)
    request = Request(cache, [1, 2, 3, 4], kv)
    poisoned(request, 2)

    result = request.commit(3, 1.0, lease=False)

    assert result.reason == "non_finite"
    cache.check()
    request.owned = 2
    request.finish()
    assert len(kv.free_ids) == kv.size


def test_a_running_request_outlives_the_poison_it_stands_on():
    """Its node leaves the tree at once and its KV only with the lease; later commits store nothing and take no KV."""
    kv = KvSlots()
    cache = late_cache(kv=kv)
    request = Request(cache, [1, 2, 3, 4, 5, 6], kv)
    poisoned(request, 3)
    other = cache.match_prefix([1, 2, 3, 4, 5, 6])
    assert other.depth == 0
    cache.check()

    owned = list(kv.free_ids)
    result = poisoned(request, 5)

    assert (result.reason, list(result.kv)) == ("non_finite", [1, 2, 3])
    assert list(kv.free_ids) == owned
    request.finish()
    assert len(kv.free_ids) == kv.size
    assert cache.checkpoints.slots.counts == (4, 0, 0, 0)


def test_a_lease_in_quarantine_still_keeps_its_whole_path():
    """The good prefix below the poison is neither evicted under the request nor missing from what it is told it owns."""
    kv = KvSlots()
    cache = late_cache(kv=kv)
    serve(cache, [1, 2, 3, 4, 5, 6, 7, 8], 2, kv=kv)
    request = Request(cache, [1, 2, 3, 4, 5, 6, 7, 8], kv)
    poisoned(request, 4)
    request.commit(6, 1.0)

    assert cache.evict_kv(100) == 0
    cache.check()
    assert list(request.commit(7, 1.0).kv) == list(request.ids[:6])
    assert cache.match_prefix([1, 2, 3, 4, 9]).matched == 2
    request.finish()
    assert len(kv.free_ids) == kv.size - 2


def test_shortage_reads_what_is_pending_before_it_evicts():
    """A poisoned reservation is given up rather than somebody's good checkpoint."""
    cache = late_cache(slots=2)
    serve(cache, [1, 2, 3], 2)
    bad = Request(cache, [4, 5, 6])
    poisoned(bad, 2)
    bad.finish()

    serve(cache, [7, 8, 9], 2)

    assert [serve(cache, prompt).depth for prompt in ([1, 2, 3], [4, 5, 6], [7, 8, 9])] == [2, 0, 2]


def test_kv_pressure_reads_what_is_pending_rather_than_give_up():
    """A leaf whose report is not read yet can be evicted once it is."""
    kv = KvSlots()
    cache = late_cache(kv=kv)
    serve(cache, [1, 2, 3], 2, kv=kv)

    assert cache.evict_kv(1) == 2
    assert len(kv.free_ids) == kv.size


def test_unread_reports_are_bounded():
    """The oldest is read once so many commits have followed, by count and not by clock."""
    cache = late_cache(slots=MAX_PENDING + 5)
    for prompt in range(MAX_PENDING + 3):
        serve(cache, [prompt, 1, 2], 2)

    assert LateReport.waits == 3
    assert cache.checkpoints.slots.counts.reserved == MAX_PENDING


def test_the_oldest_report_is_read_before_a_commit_builds_on_it():
    """The request whose poison comes to light then stores nothing on top, with its lease or without."""
    for lease in (True, False):
        kv = KvSlots()
        cache = late_cache(slots=MAX_PENDING + 5, kv=kv)
        request = Request(cache, [0, 1, 2], kv)
        poisoned(request, 1)
        for prompt in range(1, MAX_PENDING):
            serve(cache, [prompt, 1, 2], 2, kv=kv)

        assert request.commit(2, 1.0, lease=lease).reason == "non_finite"
        cache.check()


def test_agreement_is_asked_in_the_order_of_commits():
    """A collective must meet the same question on all ranks."""
    asked = []
    cache = late_cache(agree=lambda finite: asked.append(finite) or finite)
    for prompt, bad in ((1, False), (2, True), (3, False)):
        request = Request(cache, [prompt, 1, 2])
        poisoned(request, 2) if bad else request.commit(2, 1.0)
        request.finish()

    cache.flush()

    assert asked == [True, False, True]
