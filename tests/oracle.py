"""A slow, obviously correct model of the prefix cache: dicts keyed by token tuples, and one list in order of use.

It shares no code with the package and knows no nodes. ``pages[prefix]`` holds the KV ids of the last page of a cached prefix, so
that with each prefix the shorter ones are cached too; ``checkpoints[prefix]`` is what can be restored there. Every rule of the
cache is spelled out once, by brute force over those dicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

Tokens = tuple[int, ...]


@dataclass
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


@dataclass(eq=False)
class Lease:
    """What a match holds: the KV of ``path`` until it is released, and ``checkpoint`` until it is restored or the lease moves."""

    depth: int
    path: Tokens
    checkpoint: Checkpoint | None


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
    ) -> None:
        self.active_capacity, self.capacity = active, checkpoints
        self.page, self.has_kv, self.lossy, self.min_tokens = page, has_kv, lossy, min_tokens
        self.path_cap = path_cap or max(2, checkpoints // 2)
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

    def kv_of(self, prefix: Tokens) -> list[int]:
        return [kv for part in reversed(list(self.prefixes(prefix))) for kv in self.pages[part]]

    def next_pages(self, prefix: Tokens) -> set[Tokens]:
        return {other for other in self.pages if len(other) == len(prefix) + self.page and other[: len(prefix)] == prefix}

    def leads_nowhere(self, prefix: Tokens) -> bool:
        """Nothing continues ``prefix``, and no checkpoint or lease ends there."""
        return not (prefix in self.checkpoints or self.next_pages(prefix) or any(lease.path == prefix for lease in self.leases))

    def slots(self) -> dict[str, dict[str, int]]:
        """The slots of each pool by state."""
        written = sum(slot.restored for slot in self.active.values())
        locked = sum(checkpoint.locks > 0 for checkpoint in self.checkpoints.values())
        used = len(self.active), len(self.checkpoints)
        return {
            "active": {"free": self.active_capacity - used[0], "reserved": used[0] - written, "evictable": 0, "locked": written},
            "checkpoint": {"free": self.capacity - used[1], "reserved": 0, "evictable": used[1] - locked, "locked": locked},
        }

    # What the engine calls

    def match(self, tokens: Tokens) -> tuple[Lookup, Lease]:
        limit = self.floor(max(0, len(tokens) - 1))
        matched = max((len(prefix) for prefix in self.prefixes(tokens) if prefix in self.pages), default=0)
        path = next((prefix for prefix in self.prefixes(tokens[:limit]) if prefix in self.checkpoints), ())
        checkpoint, misses = self.checkpoints.get(path), self._misses(tokens, len(path), matched, limit)
        known = min(matched, limit)
        branch = known if known - len(path) >= self.min_tokens else None
        if checkpoint:
            checkpoint.locks += 1
            self._touch(path)
        lease = Lease(len(path), path, checkpoint)
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
        self.active[slot] = Active(True, lease.depth, 0, source.hops if source else 0, source.content if source else None)
        if source:
            source.reused = True
        self._drop_checkpoint(lease)
        self._count("restores_total", "restored" if source else "zeroed")
        return source.content if source else None

    def advance(self, slot: Hashable, depth: int, ring: int, content: Hashable, finite: bool) -> None:
        state = self.active[slot]
        state.depth, state.ring, state.content, state.finite = depth, ring, content, finite

    def commit(
        self, tokens: Tokens, depth: int, slot: Hashable, kv: list[int], lease: Lease | None, stored: Hashable, *, donate: bool
    ) -> Outcome:
        """``stored`` is the content that a checkpoint made of the slot now would have."""
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
        if len(prefix) != true_depth:
            return self._skip("unaligned", true_depth, lease, prefix, kv)
        if prefix in self.checkpoints:
            return Outcome("duplicate", None, true_depth, self._adopt(prefix, kv, lease))
        if not self._make_room():
            return self._skip("all_locked", true_depth, lease, prefix, kv)
        self._count("compressions_total", "stored" if state.finite else "non_finite")
        if not state.finite:
            self._count("slot_frees_total", "checkpoint", "non_finite")
            return self._skip("non_finite", true_depth, lease)
        owned = self._adopt(prefix, kv, lease)
        self.checkpoints[prefix] = Checkpoint(stored, state.hops + self.lossy)
        self.evicted_here.discard(prefix)
        self._thin_out(prefix)
        return Outcome("stored", None, true_depth, owned)

    def _skip(self, reason: str, depth: int, lease: Lease | None, prefix: Tokens = (), kv: list[int] | None = None) -> Outcome:
        """No state is stored; what was computed of the KV is worth keeping, unless it is suspect."""
        if prefix and self.has_kv:
            return Outcome("skipped", reason, depth, self._adopt(prefix, kv or [], lease))
        return Outcome("skipped", reason, depth, self.kv_of(lease.path) if lease else [])

    def _adopt(self, prefix: Tokens, kv: list[int], lease: Lease | None) -> list[int]:
        for part in self.prefixes(prefix):
            self.pages.setdefault(part, kv[len(part) - self.page : len(part)])
        self._touch(prefix)
        if lease:
            self._drop_checkpoint(lease)
            lease.path = prefix
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
        held = any(lease.path == prefix for lease in self.leases) or (checkpoint is not None and checkpoint.locks > 0)
        return not held and not self.next_pages(prefix)

    def _evict(self, prefix: Tokens, reason: str) -> int:
        """A checkpoint goes; a leaf takes its KV along, and what leads nowhere then. Returns the KV tokens freed."""
        self._drop(prefix, reason, "evicted")
        self.evicted_here.add(prefix)
        return self._remove_upwards(prefix)

    def _drop(self, prefix: Tokens, reason: str, free_reason: str) -> None:
        checkpoint = self.checkpoints.pop(prefix)
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
            lease.checkpoint = None

    def _touch(self, prefix: Tokens) -> None:
        if prefix in self.recency:
            self.recency.remove(prefix)
        self.recency.append(prefix)

    def _count(self, *series: str, by: int = 1) -> None:
        self.counts[series] += by
