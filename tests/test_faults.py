"""What went wrong in real deployments, each kind once by its number: exhaustion, leaks, handles, wrong states, hits nobody gets.

test_stateful.py drives the same calls in any order; here each fault is small enough to read.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import get_args

import pytest
import torch
from engine_side import CODECS, SPEC, KvSlots, Request, content, fill, make_cache, serve
from structlog.testing import capture_logs

from mamba_checkpoint_cache import (
    ActivePool,
    CheckpointPolicy,
    CheckpointPool,
    Duplicate,
    HandleError,
    InvariantError,
    PrefixCache,
    SideSpec,
    Skipped,
    Stored,
    Telemetry,
)
from mamba_checkpoint_cache.codec.reference import NoneCodec
from mamba_checkpoint_cache.results import MissReason

with_and_without_kv = pytest.mark.parametrize("kv", [None, KvSlots], ids=["no kv", "kv"])


def prompts(count: int, length: int = 8) -> list[list[int]]:
    """Prompts that share nothing."""
    return [[100 * i + j for j in range(length)] for i in range(1, count + 1)]


def counts(cache: PrefixCache) -> tuple[dict[str, int], dict[str, int]]:
    return cache.active.slots.counts._asdict(), cache.checkpoints.slots.counts._asdict()


def sample(telemetry: Telemetry, name: str, **labels: str) -> float | None:
    return telemetry.registry.get_sample_value(f"mamba_checkpoint_{name}", {"cache": "default", **labels})


def misses(telemetry: Telemetry) -> dict[str, float | None]:
    return {reason: sample(telemetry, "misses_total", reason=reason) for reason in get_args(MissReason)}


def depths(cache: PrefixCache, tokens: list[int]) -> list[int]:
    """The depths at which ``tokens`` and its beginnings can be continued from."""
    found = set()
    for length in range(2, len(tokens) + 2):
        match = cache.match_prefix([*tokens, -1][:length])
        found.add(match.depth)
        cache.release(match)
    return sorted(found - {0})


# Exhaustion


@with_and_without_kv
def test_fault_01_every_checkpoint_locked(kv):
    """A thousand commits that find no slot are skipped: one log line, a counter of a thousand, and nothing leaks."""
    kv = kv and kv()
    with capture_logs() as lines:
        telemetry = Telemetry()
        cache = make_cache(slots=2, kv=kv, telemetry=telemetry)
        held, other = prompts(2), prompts(3)[2]
        for tokens in held:
            serve(cache, tokens, 6, kv=kv)
        leases = [cache.match_prefix(tokens) for tokens in held]
        request = Request(cache, other, kv)

        results = [request.commit(1 + i % 8, 1.0) for i in range(1000)]

    assert {(type(result), result.reason) for result in results} == {(Skipped, "all_locked")}
    assert [line["event"] for line in lines if line["log_level"] != "debug"] == ["mamba_checkpoint.slots_exhausted"]
    assert sample(telemetry, "skips_total", reason="all_locked") == 1000
    request.finish()
    for lease in leases:
        cache.release(lease)
    assert counts(cache) == (
        {"free": 4, "reserved": 0, "evictable": 0, "locked": 0},
        {"free": 0, "reserved": 0, "evictable": 2, "locked": 0},
    )
    assert [depths(cache, tokens) for tokens in held] == [[6], [6]]
    cache.flush()
    assert kv is None or len(kv.free_ids) == kv.size


@with_and_without_kv
@pytest.mark.parametrize("seed", range(10))
def test_fault_02_a_burst_of_hits(seed, kv):
    """Many hits at once, more than there are slots of either kind, interleaved in any order: nothing raises, nothing leaks."""
    kv, random = kv and kv(), Random(seed)
    cache = make_cache(active=3, slots=2, kv=kv)
    known = prompts(2)
    for tokens in known:
        serve(cache, tokens, 4, kv=kv)

    def request(tokens: list[int]) -> Iterator[None]:
        match = cache.match_prefix(tokens)
        ids, owned = array("i", match.kv), match.depth
        yield
        while not (slot := cache.active.allocate()):
            yield
        cache.restore(match, slot)
        yield
        cache.active.advance(slot, depth=7)
        ids.extend(kv.take(7 - len(ids)) if kv else ())
        result = cache.commit(tokens, depth=7, source=slot, kv=ids if kv else None, lease=match)
        ids[: len(result.kv)] = result.kv
        yield
        cache.release(match)
        cache.active.free(slot)
        if kv:
            kv.free(ids[max(owned, len(result.kv)) :])

    running = [request(random.choice(known)) for _ in range(30)]
    for started in running:
        next(started)
    while running:
        chosen = random.choice(running)
        if next(chosen, "done") == "done":
            running.remove(chosen)
        cache.check()

    assert counts(cache)[0] == {"free": 3, "reserved": 0, "evictable": 0, "locked": 0}
    assert counts(cache)[1] == {"free": 0, "reserved": 0, "evictable": 2, "locked": 0}
    cache.flush()
    assert kv is None or len(kv.free_ids) == kv.size


def test_fault_03_a_shortage_in_one_pool_leaves_the_other_alone():
    """Without an active slot no checkpoint is evicted, and without a checkpoint slot no request loses its state."""
    cache = make_cache(active=2, slots=2)
    first, second, third, fourth = prompts(4)
    serve(cache, first, 4)
    serve(cache, second, 4)
    running = [Request(cache, third), Request(cache, fourth)]
    before = counts(cache)

    assert [cache.active.allocate() for _ in range(5)] == [None] * 5
    assert counts(cache) == before
    assert depths(cache, first) == depths(cache, second) == [4]

    leases = [cache.match_prefix(first), cache.match_prefix(second)]
    assert [request.commit(4, float(i)).reason for i, request in enumerate(running)] == ["all_locked"] * 2
    assert counts(cache)[0] == before[0]
    assert [content(cache, request.slot) for request in running] == [0.0, 1.0]
    assert [lease.depth for lease in leases] == [4, 4]


def test_fault_04_one_long_path():
    """A path that commits at every depth keeps within its cap and leaves its tail, forks, locked ones and others alone."""
    cache = make_cache(slots=12, policy=CheckpointPolicy(max_per_path=5))
    stranger, long_path = prompts(1)[0], list(range(40))
    serve(cache, stranger, 6)
    serve(cache, [*range(5), 77, 78, 79], 5, 7)
    held = Request(cache, [*range(5), 5, 6])
    held.commit(6, 1.0)
    lock = cache.match_prefix([*range(6), 99])

    serve(cache, long_path, *range(7, 40))

    kept = depths(cache, long_path)
    assert lock.depth == 6
    assert {5, 6, 39} <= set(kept)
    assert len(kept) == 5
    assert depths(cache, stranger) == [6]
    assert counts(cache)[1]["free"] > 0


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("pool", [ActivePool, CheckpointPool])
def test_fault_05_memory_cannot_hold_the_pool(pool, codec):
    """Construction fails at once, and says the slots asked for, the bytes they take, and how many would fit."""
    spec = replace(SPEC, num_layers=36, num_heads=32, d_v=128, d_k=128)
    per_slot = spec.native_bytes if pool is ActivePool else CheckpointPool.bytes_per_slot_for(spec, CODECS[codec]())
    options = {} if pool is ActivePool else {"codec": CODECS[codec]()}

    with pytest.raises(ValueError, match="1000000 slots") as failure:
        pool(spec, 1_000_000, **options)

    assert f"{per_slot:,} bytes" in str(failure.value)
    assert f"{per_slot * 1_000_001:,} bytes" in str(failure.value)
    assert "slots would fit" in str(failure.value)


def test_fault_05_the_size_of_the_pool_can_be_scraped():
    """What is running, how many slots it has and how many bytes they take are on the first scrape."""
    telemetry = Telemetry()
    cache = make_cache(active=3, slots=7, codec="int8", telemetry=telemetry)

    assert sample(telemetry, "slot_capacity", pool="checkpoint") == 7
    assert sample(telemetry, "slot_capacity", pool="active") == 3
    assert sample(telemetry, "bytes", pool="checkpoint", kind="reserved") == 8 * cache.checkpoints.bytes_per_slot
    info = next(s.labels for family in telemetry.registry.collect() for s in family.samples if s.name == "mamba_checkpoint_info")
    assert (info["codec"], info["state_dtype"], info["fingerprint"]) == ("int8", "float32", cache.checkpoints.fingerprint)


# Leaks and handles


@with_and_without_kv
@pytest.mark.parametrize("prompt_is_known", [True, False])
@pytest.mark.parametrize("stage", ["matched", "allocated", "restored", "advanced", "committed", "committed twice"])
def test_fault_06_aborted_at_any_point(stage, prompt_is_known, kv):
    """A request that ends early, wherever it stood, leaves the pools where they were but for what it stored."""
    stages = ["matched", "allocated", "restored", "advanced", "committed", "committed twice"]
    kv = kv and kv()
    cache = make_cache(kv=kv, policy=CheckpointPolicy(max_per_path=4))
    tokens = prompts(1)[0]
    if prompt_is_known:
        serve(cache, tokens, 4, kv=kv)
    before = counts(cache)
    at = stages.index(stage)

    match = cache.match_prefix(tokens)
    ids, owned = array("i", match.kv), match.depth
    slot = cache.active.allocate() if at >= 1 else None
    if at >= 2:
        cache.restore(match, slot)
    for i, depth in enumerate((6, 7), start=3):
        if at >= i:
            cache.active.advance(slot, depth=depth)
            ids.extend(kv.take(depth - len(ids)) if kv else ())
        if at > i:
            result = cache.commit(tokens, depth=depth, source=slot, kv=ids if kv else None, lease=match)
            assert isinstance(result, Stored)
            owned = depth
    cache.release(match)
    if slot:
        cache.active.free(slot)
    if kv:
        kv.free(ids[owned:])

    cache.check()
    stored = max(0, at - 3)
    assert counts(cache)[0] == before[0]
    assert counts(cache)[1] == before[1] | {"free": before[1]["free"] - stored, "evictable": before[1]["evictable"] + stored}
    cache.flush()
    assert counts(cache)[1]["free"] == 4
    assert kv is None or len(kv.free_ids) == kv.size


def test_fault_07_an_id_kept_after_free():
    """The old handle of a slot that someone else has now is refused, and the other's state stays as it is."""
    cache = make_cache(active=1)
    first, second = prompts(2)
    old = Request(cache, first)
    old.finish()
    new = Request(cache, second)
    new.commit(3, 5.0)
    lease = cache.match_prefix(second)
    before = counts(cache)

    for use in (
        lambda: cache.active.free(old.slot),
        lambda: cache.active.advance(old.slot, depth=1),
        lambda: cache.active.depth(old.slot),
        lambda: cache.restore(lease, old.slot),
        lambda: cache.commit(first, depth=3, source=old.slot),
        lambda: cache.commit(first, depth=3, source=new.slot, lease=old.match),
        lambda: cache.release(old.match),
        lambda: cache.restore(old.match, new.slot),
    ):
        with pytest.raises(HandleError):
            use()

    assert new.slot.index == old.slot.index
    assert counts(cache) == before
    assert content(cache, new.slot) == 5.0
    assert cache.active.depth(new.slot) == 3


class Faulty(NoneCodec):
    """A codec that raises on demand, after having written."""

    broken = ""

    def compress(self, *args):
        report = super().compress(*args)
        if self.broken == "compress":
            raise RuntimeError("broken")
        return report

    def restore(self, *args):
        super().restore(*args)
        if self.broken == "restore":
            raise RuntimeError("broken")


@with_and_without_kv
@pytest.mark.parametrize("step", ["compress", "agree"])
def test_fault_08_a_store_that_fails_halfway(step, kv):
    """What was reserved is free again and nothing was published: the same commit works once the fault is gone."""
    kv, codec = kv and kv(), Faulty()

    def agree(finite: bool) -> bool:
        if codec.broken == "agree":
            raise RuntimeError("broken")
        return finite

    cache = make_cache(slots=2, codec=codec, kv=kv, agree=agree)
    request = Request(cache, prompts(1)[0], kv)
    before = counts(cache)

    codec.broken = step
    for _ in range(3):
        with pytest.raises(RuntimeError, match="broken"):
            request.commit(4, 1.0)
        cache.check()
        assert counts(cache)[1] == before[1]
        assert depths(cache, request.tokens) == []

    codec.broken = ""
    assert isinstance(request.commit(4, 1.0), Stored)
    request.finish()


def test_fault_08_a_load_that_fails_halfway():
    """The half-written slot can't be committed, the lease still stands, and another try gives the right state."""
    codec = Faulty()
    cache = make_cache(codec=codec)
    tokens = prompts(1)[0]
    serve(cache, tokens, 4, value=2.0)
    match, slot = cache.match_prefix(tokens), cache.active.allocate()

    codec.broken = "restore"
    with pytest.raises(RuntimeError, match="broken"):
        cache.restore(match, slot)
    cache.check()
    with pytest.raises(HandleError):
        cache.commit(tokens, depth=4, source=slot)

    codec.broken = ""
    cache.restore(match, slot)
    assert content(cache, slot) == 8.0
    cache.release(match)
    cache.active.free(slot)
    cache.check()


@pytest.mark.parametrize("donate", [True, False])
def test_fault_09_reserved_but_never_written(donate):
    """A slot that nobody restored into is not a state: it is refused, and stays the engine's."""
    cache = make_cache()
    tokens = prompts(1)[0]
    slot = cache.active.allocate()
    before = counts(cache)

    with pytest.raises(HandleError, match="never restored"):
        cache.active.advance(slot, depth=4)
    with pytest.raises(HandleError, match="never restored"):
        cache.commit(tokens, depth=0, source=slot, donate=donate)

    assert counts(cache) == before
    assert depths(cache, tokens) == []


# Wrong state, silently


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_fault_10_kv_without_a_state(page_size):
    """Where KV goes further than the last state, only what both have is usable, and the state is that depth's."""
    kv = KvSlots()
    cache = make_cache(slots=1, kv=kv, page_size=page_size)
    tokens = prompts(1, 17)[0]
    serve(cache, tokens, 4, kv=kv)
    lock = cache.match_prefix(tokens)
    serve(cache, tokens, 16, kv=kv)

    match, slot = cache.match_prefix(tokens), cache.active.allocate()
    cache.restore(match, slot)

    assert (match.matched, match.depth, len(match.kv)) == (16, 4, 4)
    assert content(cache, slot) == 4.0

    for lease in (lock, match):
        cache.release(lease)
    serve(cache, prompts(2)[1], 4, kv=kv)
    match = cache.match_prefix(tokens)
    cache.restore(match, slot)

    assert (match.matched, match.depth, list(match.kv)) == (16, 0, [])
    assert content(cache, slot) == 0.0


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("off", [-4, -2, -1, 1, 2, 4])
def test_fault_11_a_state_off_its_key(off, page_size):
    """A state whose depth is not the one it is offered for, by a token or by a page, is not stored."""
    cache = make_cache(page_size=page_size)
    tokens = prompts(1, 16)[0]
    request = Request(cache, tokens)
    cache.active.advance(request.slot, depth=8)

    result = cache.commit(tokens, depth=8 + off, source=request.slot)

    assert (type(result), result.reason) == (Skipped, "depth_mismatch")
    assert depths(cache, tokens) == []
    assert isinstance(request.commit(8, 3.0), Stored)
    match, slot = cache.match_prefix(tokens), cache.active.allocate()
    cache.restore(match, slot)
    assert cache.active.depth(slot) == match.depth == 8


def test_fault_12_a_snapshot_of_a_running_forward(monkeypatch):
    """The copy is put on the stream behind the event that says that the source is ready, and not before it."""
    order = []

    class Recording(NoneCodec):
        def compress(self, *args):
            order.append("compress")
            return super().compress(*args)

    class Stream:
        def wait_event(self, event):
            order.append(event)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: Stream())
    cache = make_cache(codec=Recording())
    request = Request(cache, prompts(1)[0])

    request.commit(4, 1.0, ready="ready")
    request.commit(6, 2.0)

    assert order == ["ready", "compress", "compress"]


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("asked", [torch.float32, torch.bfloat16, torch.float16])
def test_fault_13_a_source_of_another_dtype(asked, given):
    """States and side states of a dtype other than the pool's are refused when the pool is built."""
    spec = replace(SPEC, dtype=asked, side=(SideSpec("conv", (5, 3), asked),))
    state = torch.zeros(2, 5, 2, 4, 3, dtype=given)
    side = {"conv": torch.zeros(2, 5, 5, 3, dtype=given)}
    right = {"state": state.to(asked), "side": {"conv": side["conv"].to(asked)}}

    if asked == given:
        assert ActivePool(spec, 4, state=state, side=side).state is state
        return
    for wrong in ({"state": state}, {"side": side}):
        with pytest.raises(ValueError, match=f"expected {asked} .* got {given}"):
            ActivePool(spec, 4, **{**right, **wrong})
    with pytest.raises(ValueError, match="different states"):
        PrefixCache(
            active=ActivePool(spec, 4, **right), checkpoints=CheckpointPool(replace(spec, dtype=given), 4, codec=NoneCodec())
        )


SIDES = (
    SideSpec("conv", (5, 3)),
    SideSpec("short", (2,), torch.float16),
    SideSpec("ngram", (4, 1), torch.int64),
    SideSpec("seen", (3,), torch.bool),
)


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_fault_14_side_states_left_behind(codec):
    """Every registered side tensor comes back bit for bit in its own dtype, whatever the codec does to the state."""
    cache = make_cache(codec=codec, spec=replace(SPEC, side=SIDES))
    tokens = prompts(1)[0]
    request = Request(cache, tokens)
    written = {s.name: torch.randint(0, 2 if s.dtype is torch.bool else 9999, (2, *s.shape)).to(s.dtype) for s in SIDES}
    for name, tensor in written.items():
        cache.active.side[name][:, request.slot.index] = tensor

    request.commit(4)
    for name in written:
        cache.active.side[name][:, request.slot.index] = 1
    match, slot = cache.match_prefix(tokens), cache.active.allocate()
    cache.restore(match, slot)

    for name, tensor in written.items():
        assert torch.equal(cache.active.side[name][:, slot.index], tensor), name


@pytest.mark.parametrize("names", [[], ["conv", "ngram"], ["ngram"]])
def test_fault_14_side_states_that_do_not_fit_the_spec(names):
    """A side tensor that is missing, or that the spec does not know, is refused when the pool is built."""
    with pytest.raises(ValueError, match="expected the side tensors"):
        ActivePool(SPEC, 4, side={name: torch.zeros(2, 5, 5, 3, dtype=torch.bfloat16) for name in names})


@with_and_without_kv
@pytest.mark.parametrize("ring", [0, 1, 3])
def test_fault_15_the_state_lags_behind_its_tokens(ring, kv):
    """A state with tokens still in the ring is stored under its true depth, and a restored slot has an empty ring."""
    kv = kv and kv()
    cache = make_cache(active=2, kv=kv)
    tokens = prompts(1, 10)[0]
    request = Request(cache, tokens, kv)
    fill(cache, request.slot, 5.0)
    cache.active.advance(request.slot, depth=8, ring=ring)

    result = cache.commit(tokens, depth=8, source=request.slot, kv=request.ids[:8] if kv else None, lease=request.match)

    assert (type(result), result.depth) == (Stored, 8 - ring)
    assert len(result.kv) == (8 - ring if kv else 0)
    assert depths(cache, tokens) == [8 - ring]
    cache.release(request.match)
    cache.active.free(request.slot)  # aborted with tokens in the ring
    slots = [cache.active.allocate(), cache.active.allocate()]
    for slot, prompt, depth in zip(slots, (tokens, prompts(2)[1]), (8 - ring, 0), strict=True):
        match = cache.match_prefix(prompt)
        cache.restore(match, slot)
        assert (cache.active.ring(slot), cache.active.depth(slot)) == (0, depth)
        assert content(cache, slot) == (5.0 if depth else 0.0)


def test_fault_16_states_of_another_kind():
    """Any difference in layout, dtype or codec is a different fingerprint, and bytes under another one are never restored."""
    specs = [SPEC, *(replace(SPEC, **{name: 7}) for name in ("num_layers", "num_heads", "d_v", "d_k"))]
    specs += [replace(SPEC, dtype=torch.bfloat16), replace(SPEC, side=()), replace(SPEC, side=(SideSpec("conv", (3, 5)),))]
    specs += [
        replace(SPEC, side=(SideSpec("conv", (5, 3), torch.float32),)),
        replace(SPEC, num_heads=SPEC.d_v, d_v=SPEC.num_heads),
    ]
    pools = [CheckpointPool(spec, 1, codec=codec()) for spec in specs for codec in CODECS.values()]
    assert len({pool.fingerprint for pool in pools}) == len(pools)

    cache = make_cache()
    tokens = prompts(1)[0]
    serve(cache, tokens, 4)
    match, slot = cache.match_prefix(tokens), cache.active.allocate()
    fill(cache, slot, 9.0)
    match.node.checkpoint.fingerprint = CheckpointPool(SPEC, 1, codec=CODECS["int8"]()).fingerprint

    with pytest.raises(InvariantError, match="in a pool of"):
        cache.restore(match, slot)
    assert content(cache, slot) == 9.0


@pytest.mark.parametrize("differs", [{"dtype": torch.bfloat16}, {"num_heads": 1}, {"side": ()}, {"d_v": 3, "d_k": 4}])
def test_fault_16_pools_of_different_kinds(differs):
    """A cache over pools whose states are not interchangeable is refused."""
    with pytest.raises(ValueError, match="different states"):
        PrefixCache(active=ActivePool(SPEC, 2), checkpoints=CheckpointPool(replace(SPEC, **differs), 2, codec=NoneCodec()))


def test_fault_17_a_rejected_token():
    """Five tokens were speculated and two accepted: the state that has seen all five is stored under neither length."""
    cache = make_cache()
    tokens = prompts(1, 12)[0]
    request = Request(cache, tokens)
    cache.active.advance(request.slot, depth=4)
    accepted, speculated = 6, 9

    assert cache.commit(tokens, depth=speculated, source=request.slot).reason == "depth_mismatch"
    assert depths(cache, tokens) == []
    cache.active.advance(request.slot, depth=speculated)
    assert cache.commit(tokens, depth=accepted, source=request.slot).reason == "depth_mismatch"
    assert depths(cache, tokens) == []
    assert isinstance(request.commit(accepted, 1.0), Stored)
    assert depths(cache, tokens) == [accepted]


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_fault_18_uninitialised_memory(codec):
    """All tensors of both pools are defined from the start."""
    cache = make_cache(codec=codec, spec=replace(SPEC, side=SIDES))
    tensors = [
        cache.active.state,
        *cache.active.side.values(),
        *cache.checkpoints.stored.values(),
        *cache.checkpoints.side.values(),
    ]

    assert all((tensor == 0).all() for tensor in tensors)


@with_and_without_kv
@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_fault_18_a_poisoned_state(value, codec, kv):
    """One bad element anywhere and the state is skipped: nothing of it can be matched, and its slot is free again."""
    kv = kv and kv()
    telemetry = Telemetry()
    cache = make_cache(codec=codec, kv=kv, telemetry=telemetry)
    tokens = prompts(1)[0]
    request = Request(cache, tokens, kv)
    places = list(itertools.product(*map(range, SPEC.shape)))

    for layer, head, v, k in places:
        fill(cache, request.slot, 1.0)
        cache.active.state[layer, request.slot.index, head, v, k] = value
        assert request.commit(4).reason == "non_finite"

    assert depths(cache, tokens) == []
    assert counts(cache)[1]["free"] == 4
    assert sample(telemetry, "compressions_total", outcome="non_finite") == len(places)
    assert isinstance(request.commit(4, 1.0), Stored)
    request.finish()
    cache.flush()
    assert kv is None or len(kv.free_ids) == kv.size


def test_fault_18_another_rank_found_the_state_poisoned():
    """A state that is finite here but not on another rank is skipped here too, and the hook is asked once per state."""
    heard = []
    cache = make_cache(agree=lambda finite: bool(heard.append(finite)))
    request = Request(cache, prompts(1)[0])

    assert request.commit(4, 1.0).reason == "non_finite"
    assert request.commit(6, math.nan).reason == "non_finite"
    assert heard == [True, False]
    assert depths(cache, request.tokens) == []


@pytest.mark.parametrize(("codec", "expected"), [("none", [0, 0, 0, 0]), ("int8", [1, 2, 3, 4])])
def test_fault_19_every_lossy_round_trip_is_counted(codec, expected):
    """A state that is restored, run on and stored again carries its hops along, and what is restored is exported."""
    telemetry = Telemetry()
    cache = make_cache(slots=8, codec=codec, telemetry=telemetry, policy=CheckpointPolicy(max_per_path=8))
    tokens = prompts(1, 20)[0]

    hops = []
    for depth in (3, 6, 9, 12):
        serve(cache, tokens[: depth + 1], depth)
        match = cache.match_prefix([*tokens[:depth], -1])
        hops.append(match.hops)
        cache.release(match)

    assert hops == expected
    assert sample(telemetry, "hops_count") == 3
    assert sample(telemetry, "hops_sum") == sum(expected[:3])


# Low hit rate nobody notices


@pytest.mark.parametrize(
    ("reason", "prompt"),
    [
        ("too_short", [1]),
        ("no_shared_prefix", [9, 9, 9]),
        ("never_checkpointed", [1, 2, 3, 9, 9]),
        ("whole_prompt", [1, 2, 3, 4, 5, 6]),
        ("evicted", [7, 7, 7, 7, 7, 7]),
    ],
)
def test_fault_20_every_miss_has_a_reason(reason, prompt):
    """Why nothing could be reused is on the match and in the counter of that reason, and in no other."""
    telemetry = Telemetry()
    cache = make_cache(slots=1, telemetry=telemetry)
    assert cache.match_prefix([1, 2, 3]).miss == "empty"
    serve(cache, [7] * 6, 5)
    serve(cache, [1, 2, 3, 4, 5, 6, 7], 6)
    before = misses(telemetry)

    match = cache.match_prefix(prompt)

    assert (match.depth, match.miss) == (0, reason)
    assert misses(telemetry) == before | {reason: before[reason] + 1}


def test_fault_20_the_same_prompt_hits_the_second_time():
    """A prompt that was served whole is reused up to its last chunk, though its last token is always run."""
    cache = make_cache()
    tokens = prompts(1)[0]

    assert serve(cache, tokens, 4, 8).depth == 0
    match = cache.match_prefix(tokens)

    assert (match.depth, match.miss) == (4, None if match.matched < 7 else "whole_prompt")


def test_fault_21_the_nearest_surviving_ancestor():
    """When the deepest checkpoint is gone the next one above serves, and what is lost by that is counted."""
    kv, telemetry = KvSlots(), Telemetry()
    cache = make_cache(slots=3, kv=kv, telemetry=telemetry, policy=CheckpointPolicy(max_per_path=3))
    tokens = prompts(1, 40)[0]
    serve(cache, tokens, 10, 20, 30, kv=kv)
    cache.release(cache.match_prefix(tokens[:11]))
    tail = cache.match_prefix(tokens)
    serve(cache, prompts(2)[1], 4, kv=kv)

    match = cache.match_prefix(tokens[:30])

    assert tail.depth == 30
    assert (match.depth, match.matched, match.miss) == (10, 30, "evicted")
    assert sample(telemetry, "tokens_total", kind="lost") == 29 - 10


def test_fault_22_only_the_consumed_checkpoint_is_refreshed():
    """Hits at the end of a path don't keep its beginning alive: the least recently used goes, wherever it hangs."""
    cache = make_cache(slots=4, policy=CheckpointPolicy(max_per_path=4))
    path, cold, new = prompts(3)
    serve(cache, path, 2, 4, 6)
    serve(cache, cold, 4)
    cache.release(cache.match_prefix(path))

    serve(cache, new, 1)
    serve(cache, new, 2)

    assert depths(cache, cold) == [4]
    assert depths(cache, path) == [6]


@with_and_without_kv
@pytest.mark.parametrize(("page_size", "branch"), [(1, 6), (4, 4)])
def test_fault_23_a_branch_seen_twice(page_size, branch, kv):
    """The second prompt that forks off is told where; with a checkpoint there the third one starts from the fork."""
    kv = kv and kv()
    cache = make_cache(kv=kv, page_size=page_size)
    shared = [1, 2, 3, 4, 5, 6]
    first, second, third = ([*shared, *tail, 0, 0] for tail in ([10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]))

    assert serve(cache, first, 8, kv=kv).branch_depth is None
    match = serve(cache, second, branch, 8, kv=kv)
    assert (match.depth, match.branch_depth) == (0, branch)
    match = serve(cache, third, 8, kv=kv)
    assert (match.depth, match.branch_depth) == (branch, None)
    assert isinstance(Request(cache, second, kv).commit(8, 1.0), Duplicate)
