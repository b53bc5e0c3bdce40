"""PrefixCache: match -> restore -> commit -> release. The only object that an engine talks to."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from mamba_checkpoint_cache.degradation import Degradation
from mamba_checkpoint_cache.drift.guard import DriftGuard
from mamba_checkpoint_cache.drift.logits import LogitComparison
from mamba_checkpoint_cache.errors import HandleError, InvariantError
from mamba_checkpoint_cache.leases import Leases
from mamba_checkpoint_cache.lifecycle import CheckpointLifecycle
from mamba_checkpoint_cache.lookup import find_hit
from mamba_checkpoint_cache.policy import CheckpointPolicy
from mamba_checkpoint_cache.pools import ActivePool, CheckpointPool
from mamba_checkpoint_cache.results import Duplicate, FlushResult, Match, Skipped, Stored
from mamba_checkpoint_cache.slots import ActiveSlot
from mamba_checkpoint_cache.telemetry.catalogue import SkipReason
from mamba_checkpoint_cache.telemetry.recorder import NULL, NullTelemetry, PoolsSnapshot, Telemetry
from mamba_checkpoint_cache.tree.components import KvAllocator
from mamba_checkpoint_cache.tree.node import Checkpoint, Node
from mamba_checkpoint_cache.tree.prefix_tree import Insertion, PrefixTree
from mamba_checkpoint_cache.tree.radix_tree import Walk, pack_tokens


@dataclass(frozen=True, slots=True)
class _Offer:
    """What a commit offers: the state in ``source`` after ``depth`` of ``tokens``, and the KV of these."""

    tokens: Sequence[int]
    depth: int
    source: ActiveSlot
    kv: array[int]
    lease: Match | None
    ready: torch.cuda.Event | None


class PrefixCache:
    """Checkpoints of recurrent states by token prefix, and the KV slots of the same tokens.

    One thread calls it. Every decision is a function of the calls before, so ranks that see the same calls decide alike;
    ``agree`` turns this rank's finding that a state is finite, or within the guard's budget, into all ranks' (for example an
    all-reduce of the minimum).

    With a ``guard``, compressed states that drift over its budget for too long are given up: from the next call on the same
    memory holds native states (fewer of them), or nothing is stored, until the guard lets the codec back in. Each change empties
    the cache. No request fails of it: those that run go on, but store nothing any more: ``Skipped("degraded")``.

    Raises:
        ValueError: if the two pools do not hold the same kind of state on the same device.
    """

    def __init__(
        self,
        *,
        active: ActivePool,
        checkpoints: CheckpointPool,
        kv: KvAllocator | None = None,
        telemetry: Telemetry | None = None,
        policy: CheckpointPolicy | None = None,
        page_size: int = 1,
        agree: Callable[[bool], bool] | None = None,
        guard: DriftGuard | None = None,
    ) -> None:
        if active.spec != checkpoints.spec:
            raise ValueError(f"the pools hold different states: active {active.spec}, checkpoints {checkpoints.spec}")
        if active.state.device != checkpoints.device:
            raise ValueError(f"the pools lie on two devices: active {active.state.device}, checkpoints {checkpoints.device}")
        self.active = active
        self.checkpoints = checkpoints
        self.policy = policy or CheckpointPolicy()
        self.telemetry: Telemetry | NullTelemetry = telemetry or NULL
        self._tree = PrefixTree(checkpoints.slots, kv, page_size)
        self._degradation = Degradation(guard, checkpoints, self.telemetry, agree)
        self._lifecycle = CheckpointLifecycle(checkpoints, self._tree, self.telemetry, agree, self._degradation.compressed)
        self._leases = Leases(self._tree, self._lifecycle)
        active.telemetry = self.telemetry
        self.telemetry.observe_pools(self._snapshot)

    def match_prefix(self, tokens: Sequence[int]) -> Match:
        """Lease the longest prefix of ``tokens`` that can be continued from; never the last token, which is always run.

        The lease keeps that prefix's KV until :meth:`release`, and its checkpoint until :meth:`restore`.

        Raises:
            ValueError: if a token is no integer or does not fit 32 bits.
        """
        key = pack_tokens(tokens)
        with self.telemetry.operation("match") as operation:
            self._degradation.follow(self._lifecycle)
            walk = self._walk(key, beyond=0)
            limit = self._tree.radix.floor(max(0, len(tokens) - 1))
            hit = find_hit(self._tree.radix, self.policy, walk, key, limit)
            match = self._leases.begin(hit, walk.matched, self._degradation.epoch)
            match.trace = operation.trace
            lost = max(0, min(match.matched, limit) - match.depth)
            operation.set(depth=match.depth, outcome="hit" if match.depth else "miss", reason=match.miss)
            self.telemetry.lookup(prompt=len(tokens), reused=match.depth, lost=lost, miss=match.miss)
        return match

    def release(self, match: Match) -> None:
        """End a lease: the request has finished, was aborted, or will match again.

        Raises:
            HandleError: if the lease has ended already, or is another cache's.
        """
        self._leases.require(match)
        self._leases.end(match)
        self.telemetry.moved()

    def restore(self, match: Match, slot: ActiveSlot) -> None:
        """Write the matched state to an active slot, or the state of an empty sequence when ``match.depth`` is 0.

        In stream order, without a host sync. Side state comes along; the slot's ring is empty afterwards. Once the copy is
        on the stream the checkpoint may be evicted again: a second restore takes a second match.

        Raises:
            HandleError: if the lease has ended or was restored already, or the slot is stale or another pool's.
        """
        self._leases.require(match)
        if match.depth and not match.restorable:
            raise HandleError("this lease was restored already, or a commit has moved it: match the prompt again")
        with self.telemetry.operation("restore", match.trace) as operation:
            self.active.begin_write(slot)
            checkpoint = match.node.checkpoint if match.restorable else None
            if checkpoint is None:
                self.active.zero(slot)
            else:
                self._require_fingerprint(checkpoint)
                self.checkpoints.restore(checkpoint.slot, self.active, slot)
                checkpoint.reused = True
            self.active.end_write(slot, depth=match.depth, hops=match.hops, epoch=match.epoch)
            operation.set(depth=match.depth, hops=match.hops, outcome="restored" if checkpoint else "zeroed")
            self._record_restore(checkpoint)
        self._leases.unlock(match)
        self.telemetry.moved()

    def _record_restore(self, checkpoint: Checkpoint | None) -> None:
        native = self.active.spec.native_bytes
        if checkpoint is None:
            self.telemetry.restored("zeroed", 0, bytes_in=0, bytes_out=native)
        else:
            self.telemetry.restored("restored", checkpoint.hops, bytes_in=self.checkpoints.bytes_per_slot, bytes_out=native)

    def commit(
        self,
        tokens: Sequence[int],
        *,
        depth: int,
        source: ActiveSlot,
        kv: Sequence[int] | None = None,
        lease: Match | None = None,
        donate: bool = False,
        ready: torch.cuda.Event | None = None,
    ) -> Stored | Duplicate | Skipped:
        """Store the state in ``source`` as the checkpoint of ``tokens[:depth]``, less what its ring still holds back.

        ``depth`` must be what the active pool knows of the slot (:meth:`ActivePool.advance`). ``kv`` has the KV slot ids of
        ``tokens[:depth]``; the result says which the tree owns now. With ``lease`` the lease moves to what was committed.
        With ``donate`` the slot is freed, whatever the outcome. The copy waits for ``ready``, recorded after the forward
        that wrote the state, if that ran on another stream.

        Raises:
            HandleError: if the slot or the lease has ended, or the slot was never restored.
            ValueError: if ``tokens`` or ``kv`` is shorter than ``depth``, or ``kv`` is missing or not wanted.
        """
        self._require_commit(tokens, depth, kv, lease)
        true_depth = depth - self.active.ring(source)
        ids = array("i") if kv is None else array("i", kv[:true_depth])
        offer = _Offer(tokens, true_depth, source, ids, lease, ready)
        with self.telemetry.operation("commit", lease.trace if lease else None) as operation:
            self._degradation.follow(self._lifecycle)
            known = depth == self.active.depth(source)
            result = self._commit(offer) if known else self._skip("depth_mismatch", offer)
            reason = result.reason if isinstance(result, Skipped) else None
            operation.set(depth=result.depth, outcome=result.outcome, reason=reason)
            if donate:
                self.active.free(source, "donated")
            self.telemetry.committed(result.outcome, reason)
        return result

    def _commit(self, offer: _Offer) -> Stored | Duplicate | Skipped:
        aligned = self._tree.radix.floor(offer.depth)
        if offer.depth < self.policy.min_tokens or aligned == 0:
            return self._skip("too_short", offer)
        self._degradation.committed(self.active, offer.source, offer.ready)
        if self._degradation.refuses(self.active.epoch(offer.source)):
            return self._skip("degraded", offer)
        key = pack_tokens(offer.tokens, aligned)
        walk = self._walk(key, beyond=offer.lease.node.depth if offer.lease else 0)
        if self._tree.is_quarantined(offer.kv):
            return self._skip("non_finite", offer)
        if aligned != offer.depth:
            return self._skip("unaligned", offer, key)
        if walk.node.depth == offer.depth and self._keeps(walk.node.checkpoint, offer):
            return Duplicate(offer.depth, self._tree.path_kv(self._insert(key, offer).node))
        return self._store(key, offer)

    def _keeps(self, checkpoint: Checkpoint | None, offer: _Offer) -> bool:
        """Whether a checkpoint that is there already stays: unless it is worn, and what is offered has fewer hops."""
        if checkpoint is None or checkpoint.report is not None or not self.policy.is_worn(checkpoint.hops):
            return checkpoint is not None
        return checkpoint.hops <= self._hops(offer)

    def _hops(self, offer: _Offer) -> int:
        """Lossy round trips behind the checkpoint that an offer would become."""
        return self.active.hops(offer.source) + self.checkpoints.codec.lossy

    def _store(self, key: bytes, offer: _Offer) -> Stored | Skipped:
        """Reserve, write, verify, publish: the tree learns of the prefix only once its state is known to be good, or pending."""
        slot = self._lifecycle.reserve()
        if isinstance(slot, str):
            return self._skip(slot, offer, key)
        if self._tree.is_quarantined(offer.kv):  # found out while the reservation read what was pending
            self._lifecycle.free(slot, "aborted")
            return self._skip("non_finite", offer)
        report = self._lifecycle.write(self.active, offer.source, slot, offer.ready)
        if report is None:
            return self._skip("non_finite", offer)
        node, fresh_from = self._insert(key, offer)
        if node.checkpoint is not None:
            self._lifecycle.supersede(node)
        self._lifecycle.hang(node, slot, self._hops(offer), report, fresh_from)
        self._thin_out(node)
        return Stored(offer.depth, self._tree.path_kv(node))

    def _skip(self, reason: SkipReason, offer: _Offer, key: bytes = b"") -> Skipped:
        """Store no state; the KV of ``key`` is kept all the same, where the model has any."""
        if key and offer.kv:
            return Skipped(offer.depth, self._tree.path_kv(self._insert(key, offer).node), reason)
        return Skipped(offer.depth, self._tree.path_kv(offer.lease.node) if offer.lease else array("i"), reason)

    def _insert(self, key: bytes, offer: _Offer) -> Insertion:
        insertion = self._tree.insert(key, offer.kv)
        if offer.lease is not None:
            self._leases.move(offer.lease, insertion.node)
        return insertion

    def _thin_out(self, tail: Node) -> None:
        path = []
        node: Node | None = tail
        while node is not None:
            if node.checkpoint is not None:
                path.append(node)
            node = node.parent
        if len(path) > self.policy.path_cap(self.checkpoints.slots.capacity):
            surplus = self.policy.thin_out(path[::-1])
            if surplus is not None:
                self._lifecycle.evict(surplus, "path_cap")

    def evict_kv(self, num_tokens: int) -> int:
        """The engine's KV allocator ran dry: free least recently used leaves until ``num_tokens`` tokens of KV came free.

        A leaf's checkpoint goes with it. Returns the tokens freed: fewer when all that is left is in use, and more by
        what was left of the last leaf.
        """
        freed = 0
        while freed < num_tokens:
            tokens = self._lifecycle.evict_leaf()
            if tokens is None:
                if not self._lifecycle.settle_all():
                    break
                continue
            freed += tokens
        return freed

    def flush(self) -> FlushResult:
        """Free every checkpoint and all KV that no lease uses."""
        flushed = FlushResult(*self._lifecycle.clear())
        self._degradation.follow(self._lifecycle)
        self.telemetry.moved()
        return flushed

    def record_check(self, result: LogitComparison | Literal["failed", "skipped"]) -> None:
        """Take note of how a sampled logit check of a restored state ended: what it measured, or why it did not.

        From the thread that makes the other calls, and with a guard, with the same result on all ranks.
        """
        self._degradation.checked(result)

    def check(self) -> None:
        """Raise :class:`InvariantError` unless slots, tree, queues and leases agree. For tests: it looks at everything."""
        self.active.slots.check()
        self._tree.check()
        self._lifecycle.check()
        self._leases.check()

    def close(self) -> None:
        """Stop reporting. The pools' memory goes when the cache does."""
        self.telemetry.close()

    def _walk(self, key: bytes, beyond: int) -> Walk:
        """Follow ``key`` through the tree, once what is pending on the way is known to be good."""
        walk = self._tree.radix.walk(key)
        if self._lifecycle.settle_path(walk.partial or walk.node, beyond):
            walk = self._tree.radix.walk(key)
        return walk

    def _snapshot(self) -> PoolsSnapshot:
        info = {
            "codec": self.checkpoints.codec.name,
            "state_dtype": str(self.active.spec.dtype).removeprefix("torch."),
            "fingerprint": self.checkpoints.fingerprint,
        }
        pools = (self.active.snapshot(), self.checkpoints.snapshot())
        return PoolsSnapshot(pools, info, self._degradation.mode, self.checkpoints.layers, self._degradation.ceilings)

    def _require_fingerprint(self, checkpoint: Checkpoint) -> None:
        if checkpoint.fingerprint != self.checkpoints.fingerprint:
            raise InvariantError(f"a checkpoint of {checkpoint.fingerprint} in a pool of {self.checkpoints.fingerprint}")

    def _require_commit(self, tokens: Sequence[int], depth: int, kv: Sequence[int] | None, lease: Match | None) -> None:
        if lease is not None:
            self._leases.require(lease)
        if not 0 <= depth <= len(tokens):
            raise ValueError(f"expected 0 <= depth <= {len(tokens)} (the tokens given), got depth={depth}")
        if (kv is not None) != self._tree.kv.present:
            raise ValueError(f"this cache has {'a KV side: pass kv' if self._tree.kv.present else 'no KV side: pass no kv'}")
        if kv is not None and len(kv) < depth:
            raise ValueError(f"expected at least {depth} KV slot ids (one per token up to depth), got {len(kv)}")
