"""Any sequence of calls, made on the cache and told to a judge who says what must come of each: exactly, or within what is safe.

States are told apart by value: each is drawn from a generator of its own, so that a wrong, stale or mixed state never passes for
the right one, not even through a lossy codec. KV slots remember for which tokens they were computed.
"""

from __future__ import annotations

import sys
from array import array
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from math import inf, nan

import pytest
import torch
from engine_side import CODECS, FadingCodec
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from oracle import Guard, Lease, Oracle, Tokens

from mamba_checkpoint_cache import (
    ActivePool,
    ActiveSlot,
    CheckpointPolicy,
    CheckpointPool,
    DriftBudget,
    DriftGuard,
    Duplicate,
    FlushResult,
    HandleError,
    LogitComparison,
    Match,
    PrefixCache,
    SideSpec,
    Skipped,
    StateSpec,
    Stored,
    Telemetry,
)
from mamba_checkpoint_cache.codec.report import Report

SPEC = StateSpec(2, 2, 3, 5, torch.float32, side=(SideSpec("conv", (3, 2)), SideSpec("ngram", (4,), torch.int64)))
PADDING = 77.0
KV_SLOTS = 48
PREFIX = "mamba_checkpoint_"

which = st.integers(0, 99)
drops = st.sampled_from([0, 0, 0, 1, 2, 4])
tails = st.lists(st.integers(0, 2), max_size=8).map(tuple)
poisons = st.sampled_from([*[None] * 9, nan, inf, -inf])


@dataclass(frozen=True)
class Content:
    """A state that was written once, and the lossy round trips it has been through since, some with a codec gone bad."""

    serial: int = 0
    trips: int = 0
    fades: int = 0

    def stored(self, *, lossy: bool, faded: bool) -> Content:
        return Content(self.serial, self.trips + lossy, self.fades + (lossy and faded))


@cache
def tensors_of(serial: int) -> dict[str, torch.Tensor]:
    """The state (under ``""``) and the side states by name, as content ``serial`` was written; 0 is the empty sequence."""
    generator = torch.Generator().manual_seed(serial)
    shapes = {"": (SPEC.shape, SPEC.dtype)} | {side.name: ((SPEC.num_layers, *side.shape), side.dtype) for side in SPEC.side}
    written = {name: (1000 * torch.randn(shape, generator=generator)).to(dtype) for name, (shape, dtype) in shapes.items()}
    return written if serial else {name: torch.zeros_like(tensor) for name, tensor in written.items()}


class KvSlots:
    """The engine's KV slots, for which tokens each was computed, and which by a poisoned run. Refuses back what is free."""

    def __init__(self) -> None:
        self.idle = set(range(KV_SLOTS))
        self.computed: dict[int, Tokens] = {}
        self.suspect: set[int] = set()

    def take(self, prefixes: Iterable[Tokens]) -> list[int]:
        taken = {self.idle.pop(): prefix for prefix in prefixes}
        self.computed |= taken
        self.suspect -= set(taken)
        return list(taken)

    def free(self, ids: array[int]) -> None:
        for kv in ids:
            assert kv not in self.idle, f"KV slot {kv} was freed twice"
            self.idle.add(kv)


@dataclass(eq=False)
class Request:
    """A running request: what the engine knows of it. Of ``kv`` the first ``shared`` belong to the tree."""

    tokens: Tokens
    match: Match
    lease: Lease | None
    kv: list[int]
    shared: int
    slot: ActiveSlot | None = None
    depth: int = 0
    ring: int = 0
    content: Content = Content()
    finite: bool = True
    written: dict[str, torch.Tensor] = field(default_factory=dict)


class Exact:
    """Everything is as the oracle says: depths, ids, reasons, slots, order of eviction, counters."""

    def __init__(
        self, cache: PrefixCache, kv_slots: KvSlots | None, telemetry: Telemetry, page: int, guard: DriftGuard | None
    ) -> None:
        self.cache, self.kv_slots, self.telemetry, self.steps = cache, kv_slots, telemetry, 0
        self.oracle = Oracle(
            active=cache.active.slots.capacity,
            checkpoints=cache.checkpoints.slots.capacity,
            page=page,
            has_kv=kv_slots is not None,
            lossy=cache.checkpoints.codec.lossy,
            path_cap=cache.policy.max_per_path,
            min_tokens=cache.policy.min_tokens,
            max_hops=cache.policy.max_hops,
            native=cache.checkpoints.slots_in_place("none"),
            guard=guard and guard_like(guard, cache.checkpoints),
        )

    def matched(self, tokens: Tokens, match: Match) -> Lease:
        expected, lease = self.oracle.match(tokens)
        assert (match.depth, match.matched, list(match.kv)) == (expected.depth, expected.matched, expected.kv), tokens
        assert (match.hops, match.branch_depth) == (expected.hops, expected.branch_depth), tokens
        assert match.miss in expected.misses, tokens
        if match.miss:
            self.oracle.counts["misses_total", match.miss] += 1
        return lease

    def allocated(self, slot: ActiveSlot | None) -> None:
        self.oracle.allocate(slot)

    def restored(self, request: Request) -> list[Content]:
        return [self.oracle.restore(request.lease, request.slot) or Content()]

    def advanced(self, request: Request) -> None:
        self.oracle.advance(request.slot, request.depth, request.ring, request.content, request.finite)

    def committed(
        self, request: Request, depth: int, kv: list[int], result: Stored | Duplicate | Skipped, *, leased: bool, donated: bool
    ) -> None:
        faded = is_faded(self.cache)
        self.oracle.follow()
        stored = request.content.stored(lossy=self.oracle.lossy, faded=faded)
        lease = request.lease if leased else None
        expected = self.oracle.commit(request.tokens, depth, request.slot, kv, lease, stored, donate=donated, faded=faded)
        reason = result.reason if isinstance(result, Skipped) else None
        found = type(result).__name__.lower(), reason, result.depth, list(result.kv)
        assert found == (expected.kind, expected.reason, expected.depth, expected.kv), request.tokens

    def freed(self, slot: ActiveSlot) -> None:
        self.oracle.free(slot)

    def released(self, request: Request) -> None:
        self.oracle.release(request.lease)

    def evicted(self, asked: int, tokens: int) -> None:
        assert tokens == self.oracle.evict_kv(asked)

    def checked(self, good: bool) -> None:
        self.oracle.check(good)

    def flushed(self, result: FlushResult) -> None:
        assert (result.checkpoints, result.kv_tokens) == self.oracle.flush()

    def check(self, requests: list[Request]) -> None:
        for pool in (self.cache.active, self.cache.checkpoints):
            assert pool.slots.counts._asdict() == self.oracle.slots()[pool.slots.pool]
        if self.kv_slots:
            engine = [kv for request in requests for kv in request.kv[request.shared :]]
            assert sorted([*engine, *self.oracle.tree_kv(), *self.kv_slots.idle]) == list(range(KV_SLOTS))
        assert self.cache._degradation.mode == (self.oracle.guard.mode if self.oracle.guard else None)
        self.steps += 1
        if self.steps % 8 == 0:  # a scrape takes longer than all else in a step
            self.check_telemetry()

    def check_telemetry(self) -> None:
        """What is scraped is the truth: each slot in one state, and every event counted once."""
        slots = {("slots", pool, state): count for pool, states in self.oracle.slots().items() for state, count in states.items()}
        scraped = scrape(self.telemetry)
        del scraped["codec_bytes_total", "in"], scraped["codec_bytes_total", "out"]
        assert {k: v for k, v in scraped.items() if v} == {k: v for k, v in {**slots, **self.oracle.counts}.items() if v}

    def known(self) -> list[Tokens]:
        self.check_telemetry()
        return list(self.oracle.pages)


class Safe:
    """Whatever is evicted, and whenever a state is found to be poisoned: what is restored was stored for exactly those tokens."""

    def __init__(
        self, cache: PrefixCache, kv_slots: KvSlots | None, telemetry: Telemetry, page: int, guard: DriftGuard | None
    ) -> None:
        self.cache, self.kv_slots, self.telemetry, self.page = cache, kv_slots, telemetry, page
        self.stored: defaultdict[tuple[int, Tokens], list[Content]] = defaultdict(list)

    def matched(self, tokens: Tokens, match: Match) -> None:
        assert match.depth <= match.matched
        assert match.depth in range(0, max(1, len(tokens)), self.page)
        assert match.depth == 0 or self.stored[match.epoch, tokens[: match.depth]], "stored, since the guard changed last"
        assert len(match.kv) == (match.depth if self.kv_slots else 0)
        assert not self.kv_slots or not self.kv_slots.suspect & set(match.kv), f"{tokens}: KV of a poisoned commit"

    def allocated(self, slot: ActiveSlot | None) -> None:
        pass

    def restored(self, request: Request) -> list[Content]:
        prefix = request.tokens[: request.match.depth]
        return self.stored[request.match.epoch, prefix] if prefix else [Content()]

    def advanced(self, request: Request) -> None:
        pass

    def committed(
        self, request: Request, depth: int, kv: list[int], result: Stored | Duplicate | Skipped, *, leased: bool, donated: bool
    ) -> None:
        if isinstance(result, Stored) and request.finite:
            content = request.content.stored(lossy=self.cache.checkpoints.codec.lossy, faded=is_faded(self.cache))
            self.stored[request.match.epoch, request.tokens[: result.depth]].append(content)
        if isinstance(result, Stored) and not request.finite and self.kv_slots:
            self.kv_slots.suspect |= {kv for i, kv in enumerate(result.kv) if i >= request.shared and kv == request.kv[i]}

    def freed(self, slot: ActiveSlot) -> None:
        pass

    def released(self, request: Request) -> None:
        pass

    def evicted(self, asked: int, tokens: int) -> None:
        pass

    def checked(self, good: bool) -> None:
        pass

    def flushed(self, result: FlushResult) -> None:
        pass

    def check(self, requests: list[Request]) -> None:
        pass

    def known(self) -> list[Tokens]:
        assert scrape(self.telemetry)["telemetry_errors_total",] == 0
        return [prefix for _, prefix in self.stored]


class Machine(RuleBasedStateMachine):
    """The engine: it makes the calls, in any order that an engine could."""

    judge_type: type[Exact | Safe] = Exact
    guarded = False

    @initialize(
        active=st.integers(2, 5),
        slots=st.sampled_from([1, 2, 3, 3, 4, 5]),
        page=st.sampled_from([1, 1, 2, 4]),
        has_kv=st.booleans(),
        codec=st.sampled_from(["none", "int8"]),
        path_cap=st.sampled_from([None, 2, 3, 9]),
        min_tokens=st.sampled_from([1, 1, 1, 3]),
        max_hops=st.sampled_from([None, None, 2, 3]),
        action=st.sampled_from(["native", "native", "native", "stop"]),
        budget=st.builds(
            DriftBudget, window=st.integers(1, 3), checks=st.integers(1, 2), recover_after=st.sampled_from([1, 3, 6])
        ),
    )
    def build(
        self,
        *,
        active: int,
        slots: int,
        page: int,
        has_kv: bool,
        codec: str,
        path_cap: int | None,
        min_tokens: int,
        max_hops: int | None,
        action: str,
        budget: DriftBudget,
    ) -> None:
        self.page = page
        guard = DriftGuard(budget, action) if self.guarded else None
        slots += 2 * self.guarded  # so that native states fit, most of the time
        self.kv_slots = KvSlots() if has_kv else None
        state = torch.full((SPEC.num_layers, SPEC.num_heads, active + 1, SPEC.d_k, SPEC.d_v), PADDING).permute(0, 2, 1, 4, 3)
        self.pool = ActivePool(SPEC, active, state=state)
        telemetry = Telemetry("stateful")
        self.cache = PrefixCache(
            active=self.pool,
            checkpoints=CheckpointPool(SPEC, slots, codec=FadingCodec() if codec == "int8" else CODECS[codec]()),
            kv=self.kv_slots,
            telemetry=telemetry,
            policy=CheckpointPolicy(min_tokens=min_tokens, max_per_path=path_cap, max_hops=max_hops),
            page_size=page,
            guard=guard,
        )
        self.codec = self.cache.checkpoints.codec
        self.judge = self.judge_type(self.cache, self.kv_slots, telemetry, page, guard)
        self.foreign_slot = ActivePool(SPEC, 1).allocate()
        self.requests: list[Request] = []
        self.history: list[Tokens] = [()]
        self.dead_slots: list[ActiveSlot] = []
        self.dead_matches: list[Match] = []
        self.serial = 0

    # The life of a request

    @rule(base=which, dropped=drops, tail=tails)
    def begin(self, base: int, dropped: int, tail: Tokens) -> None:
        """A prompt that goes on from an earlier one, or forks from it."""
        shared = self.one_of(self.history, base)
        self.match(shared[: max(0, min(len(shared) - dropped, 16))] + tail)

    @rule(
        base=which,
        dropped=drops,
        tail=tails,
        chunks=st.lists(st.tuples(st.integers(1, 3), poisons), max_size=4),
        end=st.booleans(),
    )
    def serve(self, base: int, dropped: int, tail: Tokens, chunks: list[tuple[int, float | None]], end: bool) -> None:
        """A request that goes straight through, committing at the end of each chunk."""
        self.begin(base, dropped, tail)
        request = self.requests[-1]
        self.allocate_for(request)
        if request.slot:
            self.restore_to(request)
            for pages, poison in chunks:
                self.advance(request, pages * self.page - request.depth % self.page, poison=poison)
                self.commit(request, leased=True)
        if end or not request.slot:
            self.end(request)

    @rule(base=which, turns=st.lists(st.tuples(tails, st.integers(1, 2)), min_size=2, max_size=4))
    def converse(self, base: int, turns: list[tuple[Tokens, int]]) -> None:
        """A conversation: each turn goes on from where the one before ended."""
        for i, (tail, pages) in enumerate(turns):
            self.serve(base if i == 0 else len(self.history) - 1, 0, tail, [(pages, None)], end=True)

    @precondition(lambda self: self.without_slot())
    @rule(pick=which)
    def allocate(self, pick: int) -> None:
        self.allocate_for(self.one_of(self.without_slot(), pick))

    @precondition(lambda self: self.unwritten())
    @rule(pick=which)
    def restore(self, pick: int) -> None:
        self.restore_to(self.one_of(self.unwritten(), pick))

    @precondition(lambda self: self.written())
    @rule(pick=which, steps=st.integers(1, 6), ring=st.integers(0, 3), poison=poisons)
    def run(self, pick: int, steps: int, ring: int, poison: float | None) -> None:
        self.advance(self.one_of(self.written(), pick), steps, min(ring, steps), poison)

    @precondition(lambda self: self.written())
    @rule(pick=which)
    def commit_unfinished(self, pick: int) -> None:
        """A chunk has ended: the request goes on under the lease of what it committed."""
        self.commit(self.one_of(self.written(), pick), leased=True)

    @precondition(lambda self: self.written())
    @rule(pick=which, leased=st.booleans(), donate=st.booleans())
    def commit_finished(self, pick: int, leased: bool, donate: bool) -> None:
        request = self.one_of(self.written(), pick)
        self.commit(request, leased=leased, donate=donate)
        self.end(request)

    @precondition(lambda self: self.written())
    @rule(pick=which, wrong=st.integers(-3, 3).filter(bool), leased=st.booleans())
    def commit_at_the_wrong_depth(self, pick: int, wrong: int, leased: bool) -> None:
        """The engine names another depth than it told the pool, as with a rejected speculation."""
        request = self.one_of(self.written(), pick)
        depth = request.depth + wrong
        if request.ring <= depth <= len(request.kv if self.kv_slots else request.tokens):
            result = self.commit(request, depth=depth, leased=leased)
            assert isinstance(result, Skipped)
            assert result.reason == "depth_mismatch"

    @precondition(lambda self: self.requests)
    @rule(pick=which)
    def abort(self, pick: int) -> None:
        """Wherever the request stands."""
        self.end(self.one_of(self.requests, pick))

    # The engine's other calls

    @rule(tokens=st.sampled_from([0, 1, 1, 2, 5, 12]))
    def evict_kv(self, tokens: int) -> None:
        self.judge.evicted(tokens, self.cache.evict_kv(tokens))

    @precondition(lambda self: self.guarded)
    @rule(faded=st.booleans())
    def change_codec(self, faded: bool) -> None:
        """The codec goes bad, or is itself again."""
        self.codec.faded = faded

    @rule(often=which, good=st.booleans())
    def check_logits(self, often: int, good: bool) -> None:
        if often % 4:
            return
        self.cache.record_check(LogitComparison((0.0 if good else 1.0,), (good,)))
        self.judge.checked(good)

    @rule(often=which)
    def flush(self, often: int) -> None:
        if often % 8 == 0:
            self.judge.flushed(self.cache.flush())

    # Misuse: refused, and nothing changes

    @rule(pick=which, foreign=st.booleans())
    def use_a_dead_handle(self, pick: int, foreign: bool) -> None:
        """What was freed, released or belongs to another pool is refused in every call that takes it."""
        self.refuse_slot(self.foreign_slot if foreign or not self.dead_slots else self.one_of(self.dead_slots, pick))
        if self.dead_matches:
            self.refuse_match(self.one_of(self.dead_matches, pick))

    @precondition(lambda self: self.unwritten() or self.written())
    @rule()
    def use_a_slot_at_the_wrong_time(self) -> None:
        """What was never written can't be committed, and a checkpoint is restored once per match."""
        for request in self.unwritten():
            kv = [*range(len(request.tokens))] if self.kv_slots else None
            with pytest.raises(HandleError):
                self.cache.commit(request.tokens, depth=request.match.depth, source=request.slot, kv=kv, donate=True)
        for request in self.written():
            if request.match.depth:
                with pytest.raises(HandleError):
                    self.cache.restore(request.match, request.slot)

    def refuse_slot(self, slot: ActiveSlot) -> None:
        kv = [0] if self.kv_slots else None
        for use in (
            lambda: self.pool.free(slot),
            lambda: self.pool.advance(slot, depth=1),
            lambda: self.cache.commit((1,), depth=1, source=slot, kv=kv),
            *(lambda match=request.match: self.cache.restore(match, slot) for request in self.requests),
        ):
            with pytest.raises(HandleError):
                use()

    def refuse_match(self, match: Match) -> None:
        with pytest.raises(HandleError):
            self.cache.release(match)
        for request in self.written():
            kv = request.kv if self.kv_slots else None
            for use in (
                lambda r=request: self.cache.restore(match, r.slot),
                lambda r=request, kv=kv: self.cache.commit(r.tokens, depth=r.depth, source=r.slot, kv=kv, lease=match),
            ):
                with pytest.raises(HandleError):
                    use()

    # What must hold after every step, and at the end

    @invariant()
    def all_is_well(self) -> None:
        if not hasattr(self, "judge"):
            return
        self.cache.check()
        self.judge.check(self.requests)
        assert (self.pool.state[:, 0] == PADDING).all()
        for request in self.requests:
            for name, tensor in request.written.items():
                assert same_bits(self.row(request.slot, name), tensor), (request.tokens, name)
            for i, kv in enumerate(request.kv):
                assert kv not in self.kv_slots.idle, f"{request.tokens}: KV slot {kv} was freed while in use"
                assert self.kv_slots.computed[kv] == request.tokens[: i + 1], f"KV slot {kv} is not that of token {i}"

    def teardown(self) -> None:
        """All requests end; what is left can be restored, and a flush leaves nothing."""
        if not hasattr(self, "judge") or sys.exc_info()[0]:
            return  # a step has failed: what follows from that is of no interest
        for request in [*self.requests]:
            self.end(request)
        for prefix in self.judge.known():
            self.match((*prefix, 9))
            self.allocate_for(self.requests[-1])
            self.restore_to(self.requests[-1])
            self.end(self.requests[-1])
        self.flush(0)

        self.all_is_well()
        for pool in (self.pool, self.cache.checkpoints):
            assert pool.slots.counts.free == pool.slots.capacity
        assert self.kv_slots is None or len(self.kv_slots.idle) == KV_SLOTS
        self.cache.close()

    # The calls

    def match(self, tokens: Tokens) -> None:
        match = self.cache.match_prefix(tokens)
        lease = self.judge.matched(tokens, match)
        self.requests.append(Request(tokens, match, lease, list(match.kv), match.depth))

    def allocate_for(self, request: Request) -> None:
        request.slot = self.pool.allocate()
        self.judge.allocated(request.slot)

    def restore_to(self, request: Request) -> None:
        self.cache.restore(request.match, request.slot)
        found = {name: self.row(request.slot, name).clone() for name in tensors_of(0)}
        fitting = [content for content in self.judge.restored(request) if fits(found, content)]

        assert fitting, f"{request.tokens}: restored to another state than was stored at {request.match.depth}"
        request.content, request.depth, request.written = fitting[0], request.match.depth, found

    def advance(self, request: Request, steps: int, ring: int = 0, poison: float | None = None) -> None:
        """Run ``steps`` tokens; the last ``ring`` of them stay beside the state."""
        depth = request.depth + steps
        request.tokens += tuple(i % 3 for i in range(len(request.tokens), depth))
        if self.kv_slots:
            needed = depth - len(request.kv)
            if needed > len(self.kv_slots.idle):
                self.evict_kv(needed - len(self.kv_slots.idle))
            if needed > len(self.kv_slots.idle):
                return
            request.kv += self.kv_slots.take(request.tokens[: i + 1] for i in range(len(request.kv), depth))
        self.serial += 1
        for name, tensor in tensors_of(self.serial).items():
            self.row(request.slot, name).copy_(tensor)
        if poison is not None:
            layer, head, v, k = (self.serial % size for size in SPEC.shape)
            self.row(request.slot, "")[layer, head, v, k] = poison
        self.pool.advance(request.slot, depth=depth, ring=ring)
        request.content, request.depth, request.ring, request.finite = Content(self.serial), depth, ring, poison is None
        request.written = {name: self.row(request.slot, name).clone() for name in tensors_of(0)}
        self.judge.advanced(request)

    def commit(
        self, request: Request, *, depth: int | None = None, leased: bool, donate: bool = False
    ) -> Stored | Duplicate | Skipped:
        depth = request.depth if depth is None else depth
        kv = request.kv[:depth] if self.kv_slots else None
        lease = request.match if leased else None
        result = self.cache.commit(request.tokens, depth=depth, source=request.slot, kv=kv, lease=lease, donate=donate)
        self.judge.committed(request, depth, kv or [], result, leased=leased, donated=donate)
        request.kv[: len(result.kv)] = result.kv
        request.shared = max(request.shared, len(result.kv))
        self.history.append(request.tokens[:depth])
        if donate:
            self.dead_slots.append(request.slot)
            request.slot, request.written = None, {}
        return result

    def end(self, request: Request) -> None:
        self.requests.remove(request)
        if request.slot:
            self.pool.free(request.slot)
            self.judge.freed(request.slot)
            self.dead_slots.append(request.slot)
        self.cache.release(request.match)
        self.judge.released(request)
        self.dead_matches.append(request.match)
        if self.kv_slots:
            self.kv_slots.free(array("i", request.kv[request.shared :]))

    # Looking

    def without_slot(self) -> list[Request]:
        return [request for request in self.requests if not request.slot]

    def unwritten(self) -> list[Request]:
        return [request for request in self.requests if request.slot and not request.written]

    def written(self) -> list[Request]:
        return [request for request in self.requests if request.written]

    @staticmethod
    def one_of(things: list, pick: int):
        return things[pick % len(things)]

    def row(self, slot: ActiveSlot, name: str) -> torch.Tensor:
        return (self.pool.side[name] if name else self.pool.state)[:, slot.index]


class GuardedMachine(Machine):
    """The same engine with a guard, and a codec that comes and goes."""

    guarded = True


class LateMachine(Machine):
    """The same engine on a device whose reports arrive late: a poisoned commit is found out when a decision depends on it."""

    judge_type = Safe


class LateGuardedMachine(LateMachine):
    """The same with a guard."""

    guarded = True


def is_faded(cache: PrefixCache) -> bool:
    """Whether its lossy codec is bad."""
    return getattr(cache._degradation._codec, "faded", False)


def guard_like(guard: DriftGuard, pool: CheckpointPool) -> Guard:
    """What the oracle knows of a guard in a new cache: native states are no way out if they are there, or don't fit."""
    budget, stops = guard.budget, guard.action == "stop" or not pool.codec.lossy or pool.slots_in_place("none") < 1
    return Guard(budget.window, budget.checks, budget.recover_after, "stopped" if stops else "native")


def fits(found: dict[str, torch.Tensor], content: Content) -> bool:
    """Whether this is ``content``: exactly, or as near as its round trips through int8 allow; each bad one keeps four fifths."""
    original = tensors_of(content.serial)
    bound = original[""].abs().amax(-2, keepdim=True) / 254 * 1.01 * content.trips
    near = bool(((found[""] - 0.8**content.fades * original[""]).abs() <= bound).all())
    return near and all(same_bits(found[side.name], original[side.name]) for side in SPEC.side)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def scrape(telemetry: Telemetry) -> dict[tuple[str, ...], float]:
    """Slots and counters by metric and label values in their order."""
    samples = [sample for family in telemetry.registry.collect() for sample in family.samples]
    return {
        (sample.name.removeprefix(PREFIX), *(value for label, value in sample.labels.items() if label != "cache")): sample.value
        for sample in samples
        if sample.name.endswith(("_total", "_slots"))
    }


def try_many(machine: type[Machine], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture
def late_reports(monkeypatch):
    """Reports stay unread until a decision needs them, as on a GPU."""
    monkeypatch.setattr(Report, "deferred", property(lambda _self: True))


MACHINES = pytest.mark.parametrize("machine", [Machine, GuardedMachine])
LATE_MACHINES = pytest.mark.parametrize("machine", [LateMachine, LateGuardedMachine])


@MACHINES
def test_any_sequence_of_calls_does_what_the_oracle_says(machine):
    """Match, allocate, restore, advance, commit, release, abort, evict, flush and misuse, in any order; and changes of mode."""
    try_many(machine, 60, 40)


@LATE_MACHINES
@pytest.mark.usefixtures("late_reports")
def test_any_sequence_of_calls_is_safe_while_reports_are_late(machine):
    """What is found to be bad long after the commit is never matched, and neither is the KV that came with it."""
    try_many(machine, 40, 40)


@pytest.mark.slow
@MACHINES
def test_many_long_sequences_of_calls_do_what_the_oracle_says(machine):
    """The same, longer and more of it."""
    try_many(machine, 500, 80)


@pytest.mark.slow
@LATE_MACHINES
@pytest.mark.usefixtures("late_reports")
def test_many_long_sequences_of_calls_are_safe_while_reports_are_late(machine):
    """The same, longer and more of it."""
    try_many(machine, 500, 80)
