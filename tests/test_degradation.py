"""The guard inside the cache: what a change of its mode does to what is stored, running or waiting, and what it is told."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from engine_side import FadingCodec, KvSlots, Request, content, fill, make_cache, serve
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.testing import capture_logs
from test_lifecycle import LatePool, LateReport

from mamba_checkpoint_cache import (
    CheckpointPool,
    DriftBudget,
    DriftGuard,
    Duplicate,
    HandleError,
    LogitComparison,
    PrefixCache,
    SideSpec,
    Skipped,
    StateSpec,
    Stored,
    Telemetry,
)
from mamba_checkpoint_cache.codec.layered import LayeredCodec
from mamba_checkpoint_cache.codec.reference import Int8Codec, NoneCodec

BUDGET = DriftBudget(window=4, checks=2, recover_after=12)
BAD_CHECK = LogitComparison((0.3, 0.5), (True, False))
with_and_without_kv = pytest.mark.parametrize("kv", [None, KvSlots], ids=["no kv", "kv"])


def guarded(*, slots=11, codec=None, action="native", budget=BUDGET, kv=None, **options) -> PrefixCache:
    codec = FadingCodec() if codec is None else codec
    cache = make_cache(slots=slots, codec=codec, kv=kv, guard=DriftGuard(budget, action), **options)
    cache.codec = codec
    return cache


def prompts(start: int = 0) -> Iterator[list[int]]:
    """Prompts that share nothing."""
    while True:
        start += 1
        yield [1000 + start, 2, 3, 4, 5, 6]


def degrade(cache: PrefixCache, kv: KvSlots | None = None, *, new=None) -> None:
    """Serve with a codec that has gone bad until the guard changes its mode, within its window."""
    cache.codec.faded = True
    new = new or prompts()
    for _ in range(BUDGET.window):
        if mode(cache) == "normal":
            serve(cache, next(new), 4, kv=kv)
    assert mode(cache) != "normal"


def recover(cache: PrefixCache, kv: KvSlots | None = None, *, new=None) -> int:
    """Serve until the guard is back to normal; the commits that it took."""
    new = new or prompts(500)
    for commits in range(1, 1000):
        serve(cache, next(new), 4, kv=kv)
        if mode(cache) == "normal":
            return commits
    raise AssertionError("never recovered")


def mode(cache: PrefixCache) -> str | None:
    return cache._degradation.mode


def value(telemetry: Telemetry, metric: str, **labels: str) -> float | None:
    return telemetry.registry.get_sample_value(f"mamba_checkpoint_{metric}", {"cache": "default", **labels})


def depth_of(cache: PrefixCache, tokens: list[int]) -> int:
    match = cache.match_prefix(tokens)
    cache.release(match)
    cache.check()
    return match.depth


@with_and_without_kv
def test_a_codec_gone_bad_gives_way_to_native_states_in_the_same_memory(kv):
    """Within its window; what it made is dropped, what is stored from there is exact, and not one byte more is taken."""
    kv = kv and kv()
    cache = guarded(kv=kv)
    pool, known = cache.checkpoints, [99, 2, 3, 4, 5]
    serve(cache, known, 4, kv=kv)
    block, memory = pool.stored["q"].untyped_storage().data_ptr(), 12 * pool.bytes_per_slot
    assert depth_of(cache, known) == 4

    degrade(cache, kv)
    assert depth_of(cache, known) == 0, "made by the codec"
    native = serve(cache, [7, 7, 7, 7, 7], 3, kv=kv, value=5.0)
    again = Request(cache, [7, 7, 7, 7, 7], kv)

    assert native.depth == 0
    assert (again.match.depth, again.match.hops, content(cache, again.slot)) == (3, 0, 15.0)
    assert pool.slots.capacity == CheckpointPool.slots_for(cache.active.spec, "none", memory)
    assert pool.stored["state"].untyped_storage().data_ptr() == block
    assert (pool.snapshot().bytes_reserved, pool.bytes_per_slot) == (
        (pool.slots.capacity + 1) * cache.active.spec.native_bytes,
        cache.active.spec.native_bytes,
    )
    again.finish()


@with_and_without_kv
def test_back_to_the_codec_once_its_cause_is_gone(kv):
    """After the wait and a full window of good trials, with all the slots there were; not while it is still bad."""
    kv = kv and kv()
    cache = guarded(kv=kv)
    new = prompts(100)
    degrade(cache, kv)
    for _ in range(40):
        serve(cache, next(new), 4, kv=kv)
    assert mode(cache) == "native"

    cache.codec.faded = False
    commits = recover(cache, kv, new=new)

    assert BUDGET.window <= commits <= BUDGET.recover_after
    serve(cache, [7, 7, 7, 7, 7], 3, kv=kv)
    match = cache.match_prefix([7, 7, 7, 7, 7])
    assert (match.depth, match.hops) == (3, 1)
    assert (cache.checkpoints.slots.capacity, cache.checkpoints.codec.name) == (11, "int8")
    cache.release(match)
    cache.flush()
    cache.check()
    assert kv is None or len(kv.free_ids) == kv.size


def test_the_wait_is_counted_from_the_change():
    """With a good codec it is over after so many commits, the one that ends it included, and not sooner."""
    cache = guarded()
    degrade(cache)
    cache.codec.faded = False

    assert recover(cache) == BUDGET.recover_after


def test_a_trial_of_the_last_time_is_forgotten():
    """One that was made and not read when the codec came back does not count when it has to prove itself again."""
    cache = guarded(budget=DriftBudget(window=4, recover_after=1))
    new = prompts(100)
    for _ in range(3):
        degrade(cache, new=new)
        cache.codec.faded = False

        assert recover(cache, new=new) == 6, "one trial per commit, each read at the next: four verdicts after five"


def test_too_little_memory_for_a_native_state_stops_storing():
    """Nothing is kept, and nothing fails; it recovers all the same."""
    telemetry = Telemetry()
    cache = guarded(slots=1, telemetry=telemetry)
    assert cache.checkpoints.slots_in_place("none") < 1

    degrade(cache)

    assert mode(cache) == "stopped"
    request = Request(cache, [7, 7, 7, 7])
    assert (type(result := request.commit(3, 1.0)), result.reason) == (Skipped, "degraded")
    request.finish()
    assert value(telemetry, "guard_mode", mode="stopped") == 1
    cache.codec.faded = False
    recover(cache)
    serve(cache, [7, 7, 7, 7], 3)
    assert depth_of(cache, [7, 7, 7, 7]) == 3


@with_and_without_kv
def test_the_action_stop_drops_what_is_suspect_and_keeps_nothing(kv):
    """The pool stays laid out as it is, and empty; the KV that comes with a commit stays the engine's."""
    kv = kv and kv()
    cache = guarded(action="stop", kv=kv)
    layout = cache.checkpoints.stored
    degrade(cache, kv)

    request = Request(cache, [7, 7, 7, 7], kv)
    result = request.commit(3, 1.0)

    assert (result.reason, list(result.kv)) == ("degraded", [])
    assert (cache.checkpoints.codec.name, cache.checkpoints.slots.counts) == ("int8", (11, 0, 0, 0))
    assert depth_of(cache, [7, 7, 7, 7]) == 0
    assert cache.checkpoints.stored is layout
    request.finish()
    assert kv is None or len(kv.free_ids) == kv.size


@with_and_without_kv
def test_a_match_from_before_can_still_be_restored(kv):
    """Its checkpoint is kept for it, out of the tree; nothing is stored until it is restored, and native states from then on."""
    kv = kv and kv()
    cache = guarded(kv=kv)
    known = [99, 2, 3, 4, 5]
    serve(cache, known, 4, kv=kv)
    matches = [cache.match_prefix(known), cache.match_prefix(known)]
    degrade(cache, kv)

    for match in matches:
        assert depth_of(cache, known) == 0
        waiting = Request(cache, [7, 7, 7, 7], kv)
        assert waiting.commit(3, 1.0).reason == "degraded"
        waiting.finish()
        assert cache.checkpoints.codec.name == "int8"
        slot = cache.active.allocate()
        cache.restore(match, slot)
        assert content(cache, slot) == 4.0
        cache.active.free(slot)
        cache.check()

    serve(cache, [7, 7, 7, 7], 3, kv=kv)
    assert cache.checkpoints.codec.name == "none"
    assert depth_of(cache, [7, 7, 7, 7]) == 3
    for match in matches:
        cache.release(match)
        cache.check()
    cache.flush()
    assert kv is None or len(kv.free_ids) == kv.size


@with_and_without_kv
def test_a_match_from_before_can_be_released_instead(kv):
    """The request was aborted: its checkpoint goes with the lease, and the pool is laid out at the next call."""
    kv = kv and kv()
    cache = guarded(kv=kv)
    serve(cache, [99, 2, 3, 4, 5], 4, kv=kv)
    match = cache.match_prefix([99, 2, 3, 4, 5])
    degrade(cache, kv)
    assert depth_of(cache, [1, 2]) == 0
    assert cache.checkpoints.slots.counts == (10, 0, 0, 1)

    cache.release(match)

    cache.check()
    assert cache.checkpoints.slots.counts == (11, 0, 0, 0)
    cache.flush()
    assert cache.checkpoints.codec.name == "none"
    assert kv is None or len(kv.free_ids) == kv.size


@with_and_without_kv
@pytest.mark.parametrize("lease", [True, False])
def test_what_began_before_the_change_stores_nothing_after_it(kv, lease):
    """Its state has come through the suspect codec, and its KV was computed from that: neither reaches the tree, in any mode."""
    kv = kv and kv()
    cache = guarded(kv=kv)
    tokens = [99, 2, 3, 4, 5, 6, 7, 8]
    serve(cache, tokens, 3, kv=kv)
    request = Request(cache, tokens, kv)
    request.commit(4, 1.0)
    degrade(cache, kv)

    result = request.commit(6, 1.0, lease=lease)

    assert (result.reason, list(result.kv)) == ("degraded", list(request.ids[:4]) if kv and lease else [])
    assert depth_of(cache, tokens) == 0
    cache.codec.faded = False
    recover(cache, kv)
    assert request.commit(7, 1.0, lease=lease).reason == "degraded"
    request.owned = 4 if kv else 0
    request.finish()
    cache.flush()
    assert kv is None or len(kv.free_ids) == kv.size


def test_kv_from_before_is_not_taken_for_that_of_a_new_run():
    """A new request runs the same prompt from the start: the tree takes its KV, not that of the old run, which still goes on."""
    kv = KvSlots()
    cache = guarded(kv=kv)
    tokens = [99, 2, 3, 4, 5, 6]
    old = Request(cache, tokens, kv)
    old.commit(4, 1.0)
    degrade(cache, kv)

    new = Request(cache, tokens, kv)
    given = list(new.ids)
    result = new.commit(5, 2.0)

    assert (new.match.depth, new.match.matched) == (0, 0)
    assert isinstance(result, Stored)
    assert list(result.kv) == given[:5]
    assert not set(given) & set(old.ids)
    old.finish()
    new.finish()
    cache.flush()
    assert len(kv.free_ids) == kv.size


@with_and_without_kv
def test_a_slot_reused_after_the_change_starts_clean(kv):
    """It is the match that is old, not the slot: the next request in the same row stores what it computes."""
    kv = kv and kv()
    cache = guarded(kv=kv, active=2)
    old = Request(cache, [99, 2, 3, 4], kv)
    degrade(cache, kv)
    assert old.commit(2, 1.0).reason == "degraded"
    old.finish()

    new = [Request(cache, [99 + i, 2, 3, 4], kv) for i in range(2)]

    assert old.slot.index in {request.slot.index for request in new}
    assert [type(request.commit(3, 1.0)) for request in new] == [Stored, Stored]
    for request in new:
        request.finish()


def test_a_state_that_is_not_finite_counts_as_over_budget():
    """So does one that only another rank finds so: a model gone wrong is no codec's merit."""
    for agree in (None, lambda finite: False):
        cache = guarded(agree=agree)
        for tokens, _ in zip(prompts(), range(BUDGET.window), strict=False):
            request = Request(cache, tokens)
            fill(cache, request.slot, 1.0 if agree else math.nan)
            assert request.commit(4).reason == "non_finite"
            request.finish()
        assert mode(cache) == "native"


def test_ranks_that_differ_decide_alike():
    """Each asks the others whether a state, or a trial, is within budget: what is over for one is over for all."""
    asked: list[list[bool]] = [[], []]
    heard: list[bool] = []
    first = guarded(agree=lambda good: asked[0].append(good) or good)
    degrade(first)
    first.codec.faded = False
    recover(first)

    second = guarded(agree=lambda good: asked[1].append(good) or asked[0][len(asked[1]) - 1])
    new, later = prompts(), prompts(500)
    for _ in range(BUDGET.window):
        serve(second, next(new), 4)
    heard.append(mode(second) == "native")
    recover(second, new=later)

    assert heard == [True], "its own codec is good"
    assert len(asked[0]) == len(asked[1])
    assert asked[0][:2] == [True, False]
    assert asked[1][:2] == [True, True]


def test_a_trial_that_is_over_on_another_rank_is_over_here():
    """No rank goes back to the codec alone."""
    cache = guarded()
    degrade(cache)
    cache.codec.faded, others, asked = False, [False], []
    cache._degradation._agree = lambda good: asked.append(good) or (good and others[0])
    new = prompts(200)
    for _ in range(50):
        serve(cache, next(new), 4)
    assert mode(cache) == "native"
    assert len(asked) == 50 // 2 - 1, "of trials alone: native states are not in question"
    assert all(asked)

    others[0] = True
    recover(cache)


def test_late_reports_on_native_states_are_not_held_against_the_codec():
    """They come in when it is back in service already, and tell of a time when it was not."""
    cache = guarded(slots=40, pool=LatePool)
    cache.codec.faded = True
    new = prompts()
    for _ in range(BUDGET.window):
        serve(cache, next(new), 4)
    assert cache.evict_kv(1) == 0
    cache.flush()
    assert mode(cache) == "native"
    cache.codec.faded = False
    for _ in range(BUDGET.recover_after):
        request = Request(cache, next(new))
        fill(cache, request.slot, 1.0)
        cache.active.advance(request.slot, depth=4)
        request.commit(4)
        request.finish()
    assert mode(cache) == "normal"
    told = []
    cache._degradation._guard.compression = told.append

    assert depth_of(cache, [1, 2]) == 0

    assert told == []
    assert cache.checkpoints.codec.name == "int8"


def test_ranks_are_asked_nothing_more_without_a_guard():
    """One question per state, as long as nobody watches the budget."""
    asked = []
    cache = make_cache(codec="int8", agree=lambda good: asked.append(good) or good)
    serve(cache, [1, 2, 3], 2)

    assert asked == [True]


def test_logits_over_budget_degrade_too():
    """Though every compression is within budget; checks that failed or were skipped say nothing."""
    telemetry = Telemetry()
    cache = guarded(telemetry=telemetry)
    good = LogitComparison((0.0, 0.02), (True, True))
    serve(cache, [99, 2, 3, 4, 5], 4)
    for result in ("failed", "skipped", good, "skipped", BAD_CHECK):
        assert mode(cache) == "normal"
        cache.record_check(result)

    assert mode(cache) == "native"
    assert depth_of(cache, [99, 2, 3, 4, 5]) == 0
    checks = {o: value(telemetry, "drift_checks_total", outcome=o) for o in ("ok", "over_budget", "failed", "skipped")}
    assert checks == {"ok": 1, "over_budget": 1, "failed": 1, "skipped": 2}
    assert value(telemetry, "logit_kl_nats_sum") == pytest.approx(0.82)
    assert value(telemetry, "top1_agreement_total", agreed="no") == 1


def test_logits_that_are_no_number_are_over_budget():
    """A restored run that ends in NaN is as far off as can be."""
    cache = guarded()
    for _ in range(BUDGET.checks):
        cache.record_check(LogitComparison((math.nan, 0.0), (False, True)))

    assert mode(cache) == "native"


def test_checks_are_recorded_without_a_guard():
    """Against the default budget; there is no mode to show."""
    telemetry = Telemetry()
    cache = make_cache(telemetry=telemetry)
    for _ in range(10):
        cache.record_check(BAD_CHECK)

    assert value(telemetry, "drift_checks_total", outcome="over_budget") == 10
    assert value(telemetry, "guard_mode", mode="normal") is None
    assert depth_of(cache, [1, 2]) == 0


@pytest.mark.parametrize("action", ["native", "stop"])
def test_native_states_have_nothing_to_give_way_to(action):
    """With codec none an error is never over budget; a model gone wrong stops the storing, and good states bring it back."""
    cache = guarded(codec=NoneCodec(), action=action)
    for tokens, _ in zip(prompts(), range(100), strict=False):
        serve(cache, tokens, 4)
    assert mode(cache) == "normal"
    new = prompts(200)

    def run(poison: float) -> None:
        request = Request(cache, next(new))
        fill(cache, request.slot, poison)
        request.commit(4)
        request.finish()

    for _ in range(BUDGET.window):
        run(math.nan)
    for _ in range(100):
        assert mode(cache) == "stopped"
        run(math.nan)
    recover(cache)
    serve(cache, [7, 7, 7, 7], 3)
    assert depth_of(cache, [7, 7, 7, 7]) == 3
    assert (cache.checkpoints.codec.name, cache.checkpoints.slots.capacity) == ("none", 11)


def test_two_caches_keep_their_guards_apart():
    """What one's codec does is nothing to the other."""
    first, second = guarded(), guarded()
    degrade(first)
    serve(second, [7, 7, 7, 7], 3)

    assert (mode(first), mode(second)) == ("native", "normal")
    assert depth_of(second, [7, 7, 7, 7]) == 3


@with_and_without_kv
@pytest.mark.parametrize("degraded_by", ["codec", "logits"])
def test_reports_that_are_late_change_nothing_but_the_time(kv, degraded_by):
    """On a device: pending checkpoints are read before they are dropped, poison among them is found, and all slots come free."""
    LateReport.waits = 0
    kv = kv and kv()
    cache = guarded(pool=LatePool, kv=kv)
    new = prompts()
    cache.codec.faded = degraded_by == "codec"
    for _ in range(BUDGET.window):
        serve(cache, next(new), 4, kv=kv)
    bad = Request(cache, next(new), kv)
    fill(cache, bad.slot, math.nan)
    assert isinstance(bad.commit(4), Stored)
    assert (LateReport.waits, mode(cache)) == (0, "normal")

    if degraded_by == "codec":
        cache.evict_kv(1000)
    else:
        for _ in range(BUDGET.checks):
            cache.record_check(BAD_CHECK)
    assert mode(cache) == "native"
    assert depth_of(cache, [1, 2]) == 0

    assert LateReport.waits == BUDGET.window + 1
    assert cache.checkpoints.codec.name == "none"
    assert bad.commit(5, 1.0).reason == "degraded"
    bad.finish()
    serve(cache, [7, 7, 7, 7], 3, kv=kv)
    assert depth_of(cache, [7, 7, 7, 7]) == 3
    cache.flush()
    assert kv is None or len(kv.free_ids) == kv.size


def test_a_change_in_the_middle_of_a_match():
    """The report that trips the guard is read by the match that meets it: that one gets what it found, the next does not."""
    cache = guarded(pool=LatePool)
    cache.codec.faded = True
    tokens = [99, 2, 3, 4, 5, 6]
    serve(cache, tokens, 1, 2, 3, 4)
    assert mode(cache) == "normal"

    match = cache.match_prefix(tokens)

    assert (match.depth, mode(cache)) == (4, "native")
    assert depth_of(cache, tokens) == 0
    slot = cache.active.allocate()
    assert cache.checkpoints.codec.name == "int8"
    cache.restore(match, slot)
    assert float(cache.active.state[:, slot.index].mean()) == pytest.approx(0.8 * 4, rel=1e-2)
    cache.active.advance(slot, depth=5)
    assert cache.commit(tokens, depth=5, source=slot, lease=match, donate=True).reason == "degraded"
    assert cache.checkpoints.codec.name == "none"
    cache.release(match)
    cache.check()


def test_trials_touch_neither_the_pool_nor_the_state():
    """The codec runs on what is committed, into memory of its own."""
    cache = guarded()
    degrade(cache)
    serve(cache, [7, 7, 7, 7], 3, value=2.0)
    held = Request(cache, [7, 7, 7, 7])
    before = [tensor.clone() for tensor in (*cache.checkpoints.stored.values(), *cache.checkpoints.side.values())]
    tried = cache._degradation._trials

    for _ in range(10):
        assert isinstance(held.commit(3), Duplicate)

    after = [*cache.checkpoints.stored.values(), *cache.checkpoints.side.values()]
    assert cache._degradation._trials is not tried
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert content(cache, held.slot) == 6.0


def test_a_trial_waits_for_its_state_and_not_for_its_report(monkeypatch):
    """It stands behind the event that says that the source is ready; its report is read when the next trial is made."""
    order = []
    cache = guarded()
    degrade(cache)
    request = Request(cache, [7, 7, 7, 7])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: type("Stream", (), {"wait_event": order.append}))
    monkeypatch.setattr(cache.codec, "compress", lambda *args: order.append("trial") or FadingCodec.compress(cache.codec, *args))
    monkeypatch.setattr(cache._degradation._guard, "trial", order.append)

    for _ in range(4):
        request.commit(3, 1.0, ready="ready")

    stored, tried, tried_again = ["ready"], ["ready", "trial"], [False, "ready", "trial"]
    assert order == [*stored, *tried, *tried_again]


def test_a_codec_that_raises_in_a_trial_harms_no_request():
    """It counts as a trial over budget: no request fails, and the codec stays out of service until it works."""
    telemetry = Telemetry()
    cache = guarded(telemetry=telemetry)
    degrade(cache)
    cache.codec.faded = False
    cache.codec.compress = lambda *args: (_ for _ in ()).throw(RuntimeError("device lost"))
    new = prompts(100)
    for _ in range(50):
        serve(cache, next(new), 4)
    assert mode(cache) == "native"
    assert value(telemetry, "compressions_total", outcome="rejected") > 0

    del cache.codec.compress
    recover(cache)


@pytest.mark.parametrize("released", [True, False])
def test_a_flush_while_degraded(released):
    """It frees and counts what nobody uses, as ever, and the change goes ahead with it; handles from before stay refused."""
    cache = guarded()
    serve(cache, [99, 2, 3, 4, 5], 4)
    match = cache.match_prefix([99, 2, 3, 4, 5])
    old = match.node.checkpoint.slot
    degrade(cache)
    if released:
        cache.release(match)

    assert cache.flush().checkpoints == BUDGET.window - 1 + released

    cache.check()
    assert cache.checkpoints.codec.name == ("none" if released else "int8")
    if not released:
        cache.release(match)
    assert cache.flush().checkpoints == 0
    assert cache.checkpoints.slots.counts.free == cache.checkpoints.slots.capacity < 11
    with pytest.raises(HandleError):
        cache.checkpoints.slots.state(old)
    serve(cache, [7, 7, 7, 7], 3)
    assert cache.flush().checkpoints == 1
    cache.close()


def test_kv_pressure_while_a_change_is_due():
    """What it says it freed is what came free: the change itself waits for the next match."""
    kv = KvSlots()
    cache = guarded(kv=kv)
    degrade(cache, kv)
    before = len(kv.free_ids)

    freed = cache.evict_kv(6)

    assert freed == len(kv.free_ids) - before == 8
    assert cache.checkpoints.codec.name == "int8"
    assert depth_of(cache, [1, 2]) == 0
    assert (cache.checkpoints.codec.name, len(kv.free_ids)) == ("none", kv.size)


def test_a_change_is_told_to_whoever_watches():
    """Counter, gauge, what is running, evictions by reason, log lines and events on the spans in which it happened."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with capture_logs() as lines:
        telemetry = Telemetry(tracer_provider=provider)
        cache = guarded(telemetry=telemetry)
        modes = ("normal", "native", "stopped")
        assert [value(telemetry, "guard_mode", mode=m) for m in modes] == [1, 0, 0]
        assert [value(telemetry, "guard_changes_total", to=m) for m in modes] == [0, 0, 0]
        degrade(cache)
        assert [value(telemetry, "guard_mode", mode=m) for m in modes] == [0, 1, 0]
        cache.codec.faded = False
        recover(cache)
        depth_of(cache, [1, 2])

    assert [value(telemetry, "guard_mode", mode=m) for m in modes] == [1, 0, 0]
    assert [value(telemetry, "guard_changes_total", to=m) for m in modes] == [1, 1, 0]
    dropped = [value(telemetry, "evictions_total", pool="checkpoint", reason="guard", reused=r) for r in ("yes", "no")]
    stored = value(telemetry, "commits_total", outcome="stored")
    forced = value(telemetry, "evictions_total", pool="checkpoint", reason="forced", reused="no")
    assert sum(dropped) == stored - forced
    assert dropped[1] >= BUDGET.window
    assert [(line["event"], line["mode"], line["cause"], line["commits"]) for line in lines if "guard" in line["event"]] == [
        ("mamba_checkpoint.guard_degraded", "native", "compressions", BUDGET.window),
        ("mamba_checkpoint.guard_recovered", "normal", "trials", BUDGET.recover_after),
    ]
    assert [line["codec"] for line in lines if "guard" in line["event"]] == ["none", "int8"]
    told = [
        (span.name, event.attributes["mamba_checkpoint.mode"]) for span in exporter.get_finished_spans() for event in span.events
    ]
    assert told == [("mamba_checkpoint.compress", "native"), ("mamba_checkpoint.commit", "normal")]
    assert value(telemetry, "telemetry_errors_total") == 0


def test_what_is_scraped_of_a_pool_laid_out_anew():
    """Capacity, the four states, the bytes as torch counts them and what is running all follow the layout."""
    telemetry = Telemetry()
    cache = guarded(telemetry=telemetry)
    degrade(cache)
    serve(cache, [7, 7, 7, 7], 3)
    pool, spec = cache.checkpoints, cache.active.spec

    taken = sum(tensor.numel() * tensor.element_size() for tensor in (*pool.stored.values(), *pool.side.values()))
    states = [value(telemetry, "slots", pool="checkpoint", state=s) for s in ("free", "reserved", "evictable", "locked")]
    assert value(telemetry, "slot_capacity", pool="checkpoint") == sum(states) == pool.slots.capacity
    assert value(telemetry, "bytes", pool="checkpoint", kind="reserved") == taken
    assert value(telemetry, "bytes", pool="checkpoint", kind="occupied") == spec.native_bytes
    assert value(telemetry, "bytes", pool="checkpoint", kind="native_equivalent") == spec.native_bytes
    info = next(s.labels for family in telemetry.registry.collect() for s in family.samples if s.name == "mamba_checkpoint_info")
    assert (info["codec"], info["fingerprint"]) == ("none", f"{spec.fingerprint}-none")


class FirstFading(FadingCodec):
    name = "first"


class LastFading(FadingCodec):
    name = "last"


LAYERED = StateSpec(num_layers=4, num_heads=2, d_v=4, d_k=3, side=(SideSpec("conv", (5, 3)),))


def layered_cache(*, others=None, **options) -> PrefixCache:
    """A guarded cache of four layers, of which the first two and the last can be made to drift, apart from each other."""
    first, last = FirstFading(), LastFading()
    cache = guarded(codec=LayeredCodec([first, first, others or Int8Codec(), last]), spec=LAYERED, **options)
    cache.first, cache.last = first, last
    return cache


def parts(cache: PrefixCache, slot) -> list[float]:
    """The content of each layer of a slot."""
    return [round(float(layer.mean()), 3) for layer in cache.active.state[:, slot.index]]


def serve_until_changed(cache: PrefixCache, new, kv: KvSlots | None = None) -> int:
    """Serve until the guard changes what it asks for; the requests that it took."""
    guard = cache._degradation._guard
    before = guard.mode, guard.native
    for count in range(1, 100):
        serve(cache, next(new), 4, kv=kv)
        if (guard.mode, guard.native) != before:
            return count
    raise AssertionError("never changed")


@with_and_without_kv
def test_only_the_layers_that_drift_are_kept_native(kv):
    """They come back exact, the others compressed; the same memory holds fewer slots than before, and more than all native."""
    kv = kv and kv()
    telemetry = Telemetry()
    cache = layered_cache(kv=kv, telemetry=telemetry)
    pool, memory = cache.checkpoints, 12 * cache.checkpoints.bytes_per_slot
    serve(cache, [99, 2, 3, 4, 5], 4, kv=kv)

    cache.last.faded = True
    assert serve_until_changed(cache, prompts(), kv) <= BUDGET.window
    assert (mode(cache), depth_of(cache, [99, 2, 3, 4, 5])) == ("native", 0)
    serve(cache, [7, 7, 7, 7, 7], 3, kv=kv, value=5.0)
    again = Request(cache, [7, 7, 7, 7, 7], kv)

    assert (again.match.depth, again.match.hops) == (3, 1)
    assert parts(cache, again.slot) == [15.0] * 4, "the layer that drifts was not compressed"
    assert pool.codec.name == "first,2=int8,3=none"
    assert pool.slots.capacity == CheckpointPool.slots_for(LAYERED, pool.codec, memory)
    assert CheckpointPool.slots_for(LAYERED, "none", memory) < pool.slots.capacity < 11
    assert {c: value(telemetry, "layers", codec=c) for c in ("first", "last", "int8", "none")} == {
        "first": 2,
        "last": None,
        "int8": 1,
        "none": 1,
    }
    again.finish()
    cache.flush()
    assert kv is None or len(kv.free_ids) == kv.size


def test_further_layers_follow_and_all_come_back():
    """Each change starts over; back to normal goes by trials of the codec as it was, and brings all layers back at once."""
    with capture_logs() as lines:
        hours = itertools.count(0.0, 3600.0)  # so that no line is held back
        cache, new = layered_cache(telemetry=Telemetry(clock=lambda: next(hours))), prompts()
        cache.last.faded = True
        serve_until_changed(cache, new)
        cache.first.faded = True
        assert serve_until_changed(cache, new) == BUDGET.window
        assert (mode(cache), cache._degradation._guard.native) == ("native", {0, 1, 3})
        serve(cache, next(new), 4)
        assert cache.checkpoints.codec.name == "none,2=int8"
        cache.first.faded = False
        for _ in range(40):
            serve(cache, next(new), 4)
        assert mode(cache) == "native", "trials show the drift of the last layer, which is not stored compressed"
        cache.last.faded = False
        recover(cache, new=new)
        depth_of(cache, [1, 2])

    assert cache.checkpoints.codec.name == "first,2=int8,3=last"
    assert cache.checkpoints.slots.capacity == 11
    assert [(line["mode"], line["codec"]) for line in lines if "guard" in line["event"]] == [
        ("native", "first,2=int8,3=none"),
        ("native", "none,2=int8"),
        ("normal", "first,2=int8,3=last"),
    ]


def test_one_layer_over_is_over_however_small_it_is():
    """The ceiling is each layer's own: a layer that drifts does not hide behind others that weigh more, in a trial neither."""
    cache, new = layered_cache(), prompts()
    cache.last.faded = True

    def run(commits: int) -> None:
        for _ in range(commits):
            request = Request(cache, next(new))
            fill(cache, request.slot, 1000.0)
            cache.active.state[3, request.slot.index] = 1.0
            assert isinstance(request.commit(4), Stored)
            request.finish()

    run(BUDGET.window)
    assert cache._degradation._guard.native == {3}
    run(5 * BUDGET.recover_after)
    assert cache._degradation._guard.native == {3}
    cache.last.faded = False
    run(BUDGET.recover_after)
    assert mode(cache) == "normal"


def test_layers_that_were_native_from_the_start_are_not_watched():
    """They can't drift, and their share of the ranks' questions is not asked."""
    asked = []
    cache = layered_cache(others=NoneCodec(), agree=lambda good: asked.append(good) or good)
    assert cache._degradation._guard.layers == {0, 1, 3}
    serve(cache, [99, 2, 3, 4, 5], 4)
    assert asked == [True, True], "finite, and within budget"

    cache.first.faded = True
    serve(cache, [98, 2, 3, 4, 5], 4)

    assert asked[2:] == [True, False, False, False, True], "finite, not within budget, and which of three layers is"


class Ranks:
    """An all-reduce of the minimum between threads: each call of one rank waits for that of the other."""

    def __init__(self) -> None:
        self.said = [True, True]
        self.calls = 0
        self.barrier = threading.Barrier(2, timeout=20)

    def agree(self, rank: int):
        def reduce(good: bool) -> bool:
            self.said[rank] = good
            self.calls += 1
            self.barrier.wait()
            together = all(self.said)
            self.barrier.wait()
            return together

        return reduce


def test_ranks_move_the_same_layers():
    """What drifts on one rank only is moved on both, in the same call, and comes back on both; they ask each other alike."""
    ranks = Ranks()
    caches = [layered_cache(agree=ranks.agree(rank)) for rank in range(2)]
    caches[0].first.faded = caches[1].last.faded = True

    def run(cache: PrefixCache) -> list:
        guard, new, seen = cache._degradation._guard, prompts(), []
        for call in range(60):
            if call == 20:
                cache.first.faded = cache.last.faded = False
            serve(cache, next(new), 4)
            seen.append((guard.mode, guard.native, cache.checkpoints.codec.name))
        return seen

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(run, caches)

    assert first == second
    assert first[BUDGET.window] == ("native", {0, 1, 3}, "none,2=int8")
    assert first[-1] == ("normal", frozenset(), "first,2=int8,3=last")
