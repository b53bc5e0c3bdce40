"""A slow, obviously correct model of the prefix cache: dicts keyed by token tuples, and one list in order of use.

It shares no code with the package and knows no nodes. ``pages[prefix]`` holds the KV ids of the last page of a cached prefix, so
that with each prefix the shorter ones are cached too; ``checkpoints[prefix]`` is what can be restored there. Every rule of the
cache is spelled out once, by brute force over those dicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

Tokens = tuple[int, ...]


@dataclass(eq=False)
class Checkpoint:
    """What is stored for a prefix: which content, the lossy round trips behind it, and how many leases hold it."""

    content: Hashable
    hops: int
    locks: int = 0
    reused: bool = False


@dataclass
class Active:
    """An active slot: unwritten until ``restored``."""

    restored: bool = False
    depth: int = 0
    ring: int = 0
    hops: int = 0
    content: Hashable = None
    finite: bool = True
    epoch: int = 0


@dataclass(eq=False)
class Lease:
    """What a match holds: the KV of ``path`` in ``pages`` until it is released, and ``checkpoint`` until restored or moved."""

    depth: int
    path: Tokens
    checkpoint: Checkpoint | None
    epoch: int
    pages: dict[Tokens, list[int]]


@dataclass(frozen=True)
class Lookup:
    """What a match must say. ``misses`` are the reasons that would be true."""

    depth: int
    matched: int
    kv: list[int]
    hops: int
    branch_depth: int | None
    misses: set[str | None]


@dataclass(frozen=True)
class Outcome:
    """What a commit must say: the kind and the reason, the true depth, and the KV ids that the tree owns from the start on."""

    kind: str
    reason: str | None
    depth: int
    kv: list[int]


@dataclass
class Guard:
    """The drift guard as it must behave: its rules over ``since``, all that it has heard since its mode changed last."""

    window: int
    checks: int
    recover_after: int
    degraded: str
    layers: frozenset[int] = frozenset({0})
    native: frozenset[int] = frozenset()
    mode: str = "normal"
    proven: bool = True
    failed_on: str | None = None
    wait: int = 0
    since: list[tuple[str, bool | frozenset[int]]] = field(default_factory=list)

    def hear(self, kind: str, good: bool = True, over: frozenset[int] | None = None) -> str | None:
        """A compression with the layers ``over`` bad, a check, a trial or a commit. Returns the new mode if it changes."""
        watched = frozenset() if self.mode == "stopped" else self.layers - self.native
        over = (frozenset() if good else self.layers) if over is None else over
        self.since.append((kind, over & watched if kind == "compression" else not good))
        size = {"compression": self.window, "check": self.checks}.get(kind)
        if size and watched:
            last = [bad for k, bad in self.since if k == kind][-size:]
            if len(last) == size and self._too_many(last):
                if self.mode == "normal":
                    self.wait = self.recover_after if self.proven else min(2 * self.wait, 64 * self.recover_after)
                self.failed_on = kind
                if self.degraded == "native":
                    self.native |= self._drifting(last) if kind == "compression" else watched
                return self._change(self.degraded)
            lasted = len(last) == size and kind == self.failed_on and self.commits >= self.recover_after
            self.proven = self.proven or (self.mode == "normal" and lasted)
        elif self.mode != "normal" and kind == "commit" and self.commits >= self.wait:
            trials = [bad for k, bad in self.since if k == "trial"][-self.window :]
            if len(trials) == self.window and not any(trials):
                self.proven, self.native = False, frozenset()
                return self._change("normal")
        return None

    def _too_many(self, bad: list) -> bool:
        return sum(map(bool, bad)) >= len(bad) - sum(map(bool, bad))

    def _drifting(self, last: list[frozenset[int]]) -> frozenset[int]:
        """Of all ways to keep the layers most often over budget native, the one with the fewest that does."""
        ranking = sorted(self.layers, key=lambda layer: (-sum(layer in over for over in last), layer))
        ways = (frozenset(ranking[:count]) for count in range(len(ranking) + 1))
        return next(way for way in ways if not self._too_many([over - way for over in last]))

    @property
    def commits(self) -> int:
        return sum(kind == "commit" for kind, _ in self.since)

    @property
    def trial_due(self) -> bool:
        return self.mode != "normal" and self.commits % max(1, (self.recover_after - 1) // (self.window + 1)) == 0

    def _change(self, mode: str) -> str:
        self.mode, self.since = mode, []
        return mode


class Oracle:
    """The cache as it must behave. ``counts`` has what its counters must read, by metric and label values in their order."""

    def __init__(
        self,
        *,
        active: int,
        checkpoints: int,
        page: int,
        has_kv: bool,
        lossy: bool,
        path_cap: int | None = None,
        min_tokens: int = 1,
        max_hops: int | None = None,
        native: int = 0,
        guard: Guard | None = None,
    ) -> None:
        """``native`` slots are what the pool has when it holds native states."""
        self.active_capacity, self.capacity = active, checkpoints
        self.page, self.has_kv, self.lossy, self.min_tokens = page, has_kv, lossy, min_tokens
        self.given_path_cap, self.max_hops = path_cap, max_hops
        self.guard, self.followed, self.laid_out, self.epoch = guard, "normal", True, 0
        self.layouts = {"normal": (checkpoints, lossy), "stopped": (checkpoints, lossy), "native": (native, False)}
        self.unread: bool | None = None
        self.faded = False
        self.past: list[dict[Tokens, list[int]]] = []
        self.orphans: list[Checkpoint] = []
        self.active: dict[Hashable, Active] = {}
        self.pages: dict[Tokens, list[int]] = {}
        self.checkpoints: dict[Tokens, Checkpoint] = {}
        self.recency: list[Tokens] = []
        self.leases: list[Lease] = []
        self.evicted_here: set[Tokens] = set()
        self.evicted_whole: set[Tokens] = set()
        self.counts: Counter[tuple[str, ...]] = Counter()

    # What is there

    def floor(self, depth: int) -> int:
        return depth // self.page * self.page

    def prefixes(self, tokens: Tokens) -> Iterator[Tokens]:
        """The prefixes of ``tokens`` in whole pages, longest first, the empty one left out."""
        return (tokens[:n] for n in range(self.floor(len(tokens)), 0, -self.page))

    @property
    def path_cap(self) -> int:
        return self.given_path_cap or max(2, self.capacity // 2)

    def is_worn(self, checkpoint: Checkpoint) -> bool:
        return self.max_hops is not None and checkpoint.hops >= self.max_hops

    def kv_of(self, prefix: Tokens, pages: dict[Tokens, list[int]] | None = None) -> list[int]:
        pages = self.pages if pages is None else pages
        return [kv for part in reversed(list(self.prefixes(prefix))) for kv in pages[part]]

    def tree_kv(self) -> list[int]:
        """Every KV slot that is the tree's, also those that only leases of before a change still hold."""
        return [kv for pages in (self.pages, *self.past) for page in pages.values() for kv in page]

    def next_pages(self, prefix: Tokens) -> set[Tokens]:
        return {other for other in self.pages if len(other) == len(prefix) + self.page and other[: len(prefix)] == prefix}

    def leads_nowhere(self, prefix: Tokens) -> bool:
        """Nothing continues ``prefix``, and no checkpoint or lease ends there."""
        return not (prefix in self.checkpoints or self.next_pages(prefix) or self.is_leased(prefix))

    def is_leased(self, prefix: Tokens) -> bool:
        return any(lease.path == prefix for lease in self.leases if lease.pages is self.pages)

    def slots(self) -> dict[str, dict[str, int]]:
        """The slots of each pool by state."""
        written = sum(slot.restored for slot in self.active.values())
        locked = sum(checkpoint.locks > 0 for checkpoint in self.checkpoints.values()) + len(self.orphans)
        used = len(self.active), len(self.checkpoints) + len(self.orphans)
        return {
            "active": {"free": self.active_capacity - used[0], "reserved": used[0] - written, "evictable": 0, "locked": written},
            "checkpoint": {"free": self.capacity - used[1], "reserved": 0, "evictable": used[1] - locked, "locked": locked},
        }

    # What the engine calls

    def follow(self) -> None:
        """Before a match or a commit, and after a flush: what a change of the guard's mode leads to."""
        if self.guard and self.guard.mode != self.followed:
            self.followed, self.laid_out = self.guard.mode, False
            self.epoch += 1
            self.orphans += [checkpoint for checkpoint in self.checkpoints.values() if checkpoint.locks]
            for prefix in [prefix for prefix, checkpoint in self.checkpoints.items() if not checkpoint.locks]:
                self._drop(prefix, "guard", "evicted")
            self.past.append(self.pages)
            self.pages, self.checkpoints, self.recency = {}, {}, []
            self.evicted_here, self.evicted_whole = set(), set()
            self._forget_the_past()
        if not self.laid_out and not self.orphans:
            self.capacity, self.lossy = self.layouts[self.followed]
            self.laid_out = True

    def check(self, good: bool) -> None:
        """A logit check ended."""
        self._count("drift_checks_total", "ok" if good else "over_budget")
        self._count("top1_agreement_total", "yes" if good else "no")
        self._hear("check", good)

    def match(self, tokens: Tokens) -> tuple[Lookup, Lease]:
        self.follow()
        limit = self.floor(max(0, len(tokens) - 1))
        matched = max((len(prefix) for prefix in self.prefixes(tokens) if prefix in self.pages), default=0)
        held = [prefix for prefix in self.prefixes(tokens[:limit]) if prefix in self.checkpoints]
        worn = bool(held) and self.is_worn(self.checkpoints[held[0]])
        path = next((prefix for prefix in held if not worn or self.checkpoints[prefix].hops == 0), ())
        checkpoint = self.checkpoints.get(path)
        misses = {"hop_cap"} if worn else self._misses(tokens, len(path), matched, limit)
        known = min(matched, limit)
        worthwhile = len(held[0]) if worn else known
        branch = worthwhile if worthwhile - len(path) >= self.min_tokens else None
        if checkpoint:
            checkpoint.locks += 1
            self._touch(path)
        lease = Lease(len(path), path, checkpoint, self.epoch, self.pages)
        self.leases.append(lease)
        self._count("lookups_total", "hit" if path else "miss")
        self._count("tokens_total", "prompt", by=len(tokens))
        self._count("tokens_total", "reused", by=len(path))
        self._count("tokens_total", "lost", by=max(0, known - len(path)))
        return Lookup(len(path), matched, self.kv_of(path), checkpoint.hops if checkpoint else 0, branch, misses), lease

    def allocate(self, slot: Hashable | None) -> None:
        """``slot`` is what the pool gave."""
        assert (slot is None) == (len(self.active) == self.active_capacity)
        self._count("slot_allocations_total", "active", "exhausted" if slot is None else "ok")
        if slot is not None:
            self.active[slot] = Active()

    def restore(self, lease: Lease, slot: Hashable) -> Hashable:
        """Returns the content that the slot must have now; None for the empty sequence."""
        source = lease.checkpoint
        hops, content = (source.hops, source.content) if source else (0, None)
        self.active[slot] = Active(True, lease.depth, 0, hops, content, epoch=lease.epoch)
        if source:
            source.reused = True
        self._drop_checkpoint(lease)
        self._count("restores_total", "restored" if source else "zeroed")
        return source.content if source else None

    def advance(self, slot: Hashable, depth: int, ring: int, content: Hashable, finite: bool) -> None:
        state = self.active[slot]
        state.depth, state.ring, state.content, state.finite = depth, ring, content, finite

    def commit(
        self,
        tokens: Tokens,
        depth: int,
        slot: Hashable,
        kv: list[int],
        lease: Lease | None,
        stored: Hashable,
        *,
        donate: bool,
        faded: bool = False,
    ) -> Outcome:
        """``stored`` is the content that a checkpoint made of the slot now would have; ``faded``: the lossy codec is bad."""
        self.follow()
        self.faded = faded
        outcome = self._commit(tokens, depth, self.active[slot], kv, lease, stored)
        if donate:
            self.free(slot, "donated")
        self._count("commits_total", outcome.kind)
        if outcome.reason:
            self._count("skips_total", outcome.reason)
        return outcome

    def release(self, lease: Lease) -> None:
        self._drop_checkpoint(lease)
        self.leases.remove(lease)
        self._prune()
        self._forget_the_past()

    def free(self, slot: Hashable, reason: str = "released") -> None:
        del self.active[slot]
        self._count("slot_frees_total", "active", reason)

    def evict_kv(self, num_tokens: int) -> int:
        freed = 0
        while self.has_kv and freed < num_tokens:
            leaves = [prefix for prefix in self.recency if self._is_idle_leaf(prefix)]
            if not leaves:
                break
            freed += self._evict(leaves[0], "kv_pressure") if leaves[0] in self.checkpoints else self._remove_upwards(leaves[0])
        return freed

    def flush(self) -> tuple[int, int]:
        """Returns the checkpoints and the KV tokens freed."""
        idle = [prefix for prefix, checkpoint in self.checkpoints.items() if not checkpoint.locks]
        for prefix in idle:
            self._drop(prefix, "flush", "flushed")
        tokens = 0
        for prefix in sorted(self.pages, key=len, reverse=True):
            if self.leads_nowhere(prefix):
                tokens += self._remove(prefix)
        self.evicted_whole.clear()
        self.follow()
        return len(idle), tokens

    # How it decides

    def _misses(self, tokens: Tokens, depth: int, matched: int, limit: int) -> set[str | None]:
        if limit == 0:
            return {"too_short"}
        if depth == limit:
            return {None}
        if any(depth < len(prefix) <= limit and prefix in self.evicted_here for prefix in self.prefixes(tokens)):
            return {"evicted"}
        if matched > depth:
            beyond = any(len(prefix) > limit and prefix in self.checkpoints for prefix in self.prefixes(tokens))
            reason = "whole_prompt" if beyond else "never_checkpointed"
        else:
            reason = None if depth else "no_shared_prefix" if self.pages else "empty"
        # A path that went as a whole may be remembered or forgotten.
        goes_on = tokens[: matched + self.page]
        return {reason, "evicted"} if goes_on in self.evicted_whole else {reason}

    def _commit(self, tokens: Tokens, depth: int, state: Active, kv: list[int], lease: Lease | None, stored: Hashable) -> Outcome:
        true_depth = depth - state.ring
        prefix = tokens[: self.floor(true_depth)]
        if depth != state.depth:
            return self._skip("depth_mismatch", true_depth, lease)
        if true_depth < self.min_tokens or not prefix:
            return self._skip("too_short", true_depth, lease)
        self._offered(state.finite)
        if state.epoch != self.epoch or not self.laid_out or self.followed == "stopped":
            return self._skip("degraded", true_depth, lease)
        if len(prefix) != true_depth:
            return self._skip("unaligned", true_depth, lease, prefix, kv)
        hops, there = state.hops + self.lossy, self.checkpoints.get(prefix)
        if there and not (self.is_worn(there) and hops < there.hops):
            return Outcome("duplicate", None, true_depth, self._adopt(prefix, kv, lease))
        if not self._make_room():
            return self._skip("all_locked", true_depth, lease, prefix, kv)
        self._count("compressions_total", "stored" if state.finite else "non_finite")
        if self.followed == "normal":
            self._hear("compression", state.finite and not (self.faded and self.lossy))
        if not state.finite:
            self._count("slot_frees_total", "checkpoint", "non_finite")
            return self._skip("non_finite", true_depth, lease)
        owned = self._adopt(prefix, kv, lease)
        if prefix in self.checkpoints:
            self._drop(prefix, "hop_cap", "evicted")
        self.checkpoints[prefix] = Checkpoint(stored, hops)
        self.evicted_here.discard(prefix)
        self._thin_out(prefix)
        return Outcome("stored", None, true_depth, owned)

    def _skip(self, reason: str, depth: int, lease: Lease | None, prefix: Tokens = (), kv: list[int] | None = None) -> Outcome:
        """No state is stored; what was computed of the KV is worth keeping, unless it is suspect."""
        if prefix and self.has_kv:
            return Outcome("skipped", reason, depth, self._adopt(prefix, kv or [], lease))
        return Outcome("skipped", reason, depth, self.kv_of(lease.path, lease.pages) if lease else [])

    def _offered(self, finite: bool) -> None:
        """A commit counts, and in a degraded mode some are trials of the lossy codec, judged when the next one is made."""
        if not self.guard:
            return
        self._hear("commit")
        if self.guard.trial_due:
            if self.unread is not None:
                self._hear("trial", self.unread)
            self.unread = finite and not (self.faded and self.layouts["normal"][1])

    def _hear(self, kind: str, good: bool = True) -> None:
        if self.guard and (mode := self.guard.hear(kind, good)):
            self.unread = None
            self._count("guard_changes_total", mode)

    def _adopt(self, prefix: Tokens, kv: list[int], lease: Lease | None) -> list[int]:
        for part in self.prefixes(prefix):
            self.pages.setdefault(part, kv[len(part) - self.page : len(part)])
        self._touch(prefix)
        if lease:
            self._drop_checkpoint(lease)
            lease.path, lease.pages = prefix, self.pages
        return self.kv_of(prefix)

    def _make_room(self) -> bool:
        outcome = "ok"
        if len(self.checkpoints) == self.capacity:
            idle = [prefix for prefix in self.recency if prefix in self.checkpoints and not self.checkpoints[prefix].locks]
            outcome = "after_eviction" if idle else "all_locked"
            if idle:
                self._evict(idle[0], "forced")
        self._count("slot_allocations_total", "checkpoint", outcome)
        return outcome != "all_locked"

    def _thin_out(self, tail: Tokens) -> None:
        """A path over its cap gives up the one between the closest neighbours; never the last two, a fork or a locked one."""
        path = [prefix for prefix in reversed(list(self.prefixes(tail))) if prefix in self.checkpoints]
        if len(path) <= self.path_cap:
            return
        gaps = {
            prefix: len(below) - len(above)
            for above, prefix, below in zip([(), *path], path[:-2], path[1:], strict=False)
            if len(self.next_pages(prefix)) == 1 and not self.checkpoints[prefix].locks
        }
        if gaps:
            self._evict(min(gaps, key=lambda prefix: (gaps[prefix], len(prefix))), "path_cap")

    def _is_idle_leaf(self, prefix: Tokens) -> bool:
        checkpoint = self.checkpoints.get(prefix)
        held = self.is_leased(prefix) or (checkpoint is not None and checkpoint.locks > 0)
        return not held and not self.next_pages(prefix)

    def _evict(self, prefix: Tokens, reason: str) -> int:
        """A checkpoint goes; a leaf takes its KV along, and what leads nowhere then. Returns the KV tokens freed."""
        self._drop(prefix, reason, "evicted")
        self.evicted_here.add(prefix)
        return self._remove_upwards(prefix)

    def _drop(self, prefix: Tokens, reason: str, free_reason: str) -> None:
        self._bury(self.checkpoints.pop(prefix), reason, free_reason)

    def _bury(self, checkpoint: Checkpoint, reason: str, free_reason: str) -> None:
        assert not checkpoint.locks
        self._count("evictions_total", "checkpoint", reason, "yes" if checkpoint.reused else "no")
        self._count("slot_frees_total", "checkpoint", free_reason)

    def _remove_upwards(self, prefix: Tokens) -> int:
        freed = 0
        while prefix and self.leads_nowhere(prefix):
            self.evicted_whole.add(prefix)
            freed += self._remove(prefix)
            prefix = prefix[: -self.page]
        return freed

    def _remove(self, prefix: Tokens) -> int:
        if prefix in self.recency:
            self.recency.remove(prefix)
        self.evicted_here.discard(prefix)
        return len(self.pages.pop(prefix))

    def _prune(self) -> None:
        """Without KV a prefix is nothing but what hangs on it."""
        for prefix in sorted(self.pages, key=len, reverse=True) if not self.has_kv else ():
            if self.leads_nowhere(prefix):
                self._remove(prefix)

    def _drop_checkpoint(self, lease: Lease) -> None:
        if lease.checkpoint:
            lease.checkpoint.locks -= 1
            if lease.checkpoint in self.orphans and not lease.checkpoint.locks:
                self.orphans.remove(lease.checkpoint)
                self._bury(lease.checkpoint, "guard", "evicted")
            lease.checkpoint = None

    def _forget_the_past(self) -> None:
        """What was computed before a change lives as long as a lease of before stands on it."""
        for pages in self.past:
            held = {part for lease in self.leases if lease.pages is pages for part in self.prefixes(lease.path)}
            for prefix in set(pages) - held:
                del pages[prefix]

    def _touch(self, prefix: Tokens) -> None:
        if prefix in self.recency:
            self.recency.remove(prefix)
        self.recency.append(prefix)

    def _count(self, *series: str, by: int = 1) -> None:
        self.counts[series] += by
