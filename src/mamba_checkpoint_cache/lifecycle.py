"""The life of a checkpoint: reserve, write, verify, publish, evict, free."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal

import torch

from mamba_checkpoint_cache.codec.report import Report, Verdict
from mamba_checkpoint_cache.errors import InvariantError
from mamba_checkpoint_cache.pools import ActivePool, CheckpointPool
from mamba_checkpoint_cache.slots import ActiveSlot, CheckpointSlot
from mamba_checkpoint_cache.telemetry.catalogue import AllocationOutcome, EvictionReason, FreeReason
from mamba_checkpoint_cache.telemetry.recorder import NullTelemetry, Telemetry
from mamba_checkpoint_cache.tree.node import Checkpoint, Node
from mamba_checkpoint_cache.tree.prefix_tree import PrefixTree

MAX_PENDING = 32
"""Reports left unread at most. By the time that so many commits have followed, the oldest has long arrived."""

Shortage = Literal["exhausted", "all_locked"]


class CheckpointLifecycle:
    """Moves checkpoint slots from free to published and back, and tells telemetry of each step.

    A report that is still on its way from a device leaves its checkpoint pending: it is read when a decision depends on it, at
    points that the sequence of calls alone determines, so that timing never changes a decision and ``agree`` may be collective.
    ``compressed`` hears each verdict, and whether all ranks found the state finite.
    """

    def __init__(
        self,
        pool: CheckpointPool,
        tree: PrefixTree,
        telemetry: Telemetry | NullTelemetry,
        agree: Callable[[bool], bool] | None,
        compressed: Callable[[Verdict, bool], None],
    ) -> None:
        self._pool = pool
        self._tree = tree
        self._telemetry = telemetry
        self._agree = agree or bool
        self._compressed = compressed
        self._pending: deque[Node] = deque()

    def reserve(self) -> CheckpointSlot | Shortage:
        """A free slot, if need be after evicting the least recently used checkpoint; else the kind of shortage."""
        if len(self._pending) >= MAX_PENDING:
            self.settle([self._pending[0]])
        with self._telemetry.operation("alloc") as operation:
            outcome: AllocationOutcome = "ok"
            slot = self._pool.slots.reserve()
            if slot is None:
                self.settle_all()
                slot = self._pool.slots.reserve()
            while slot is None and (victim := self._tree.checkpoints.evictable.pop()) is not None:
                self.evict(victim, "forced")
                slot, outcome = self._pool.slots.reserve(), "after_eviction"
            if slot is None:
                outcome = self._shortage()
            operation.set(pool="checkpoint", outcome=outcome)
            self._telemetry.allocation("checkpoint", outcome)
        return self._shortage() if slot is None else slot

    def write(
        self, source: ActivePool, source_slot: ActiveSlot, slot: CheckpointSlot, ready: torch.cuda.Event | None
    ) -> Report | None:
        """Compress into a reserved slot, after ``ready``, and read the report if it is here already.

        Returns None, with the slot free again, if the state is not finite. It is free again also if this raises.
        """
        with self._telemetry.operation("compress") as operation:
            operation.set(pool="checkpoint", bytes=self._pool.bytes_per_slot)
            try:
                if ready is not None:
                    torch.cuda.current_stream(source.state.device).wait_event(ready)
                report = self._pool.compress(source, source_slot, slot)
                finite = report.deferred or self.accept(report)
            except BaseException:
                self.free(slot, "aborted")
                self._telemetry.compression("rejected", bytes_in=0, bytes_out=0)
                raise
        if not finite:
            self.free(slot, "non_finite")
            return None
        return report

    def accept(self, report: Report) -> bool:
        """Read a report: whether all ranks found the state finite."""
        verdict = report.verdict()
        finite = self._agree(verdict.finite)
        native, stored = self._pool.spec.native_bytes, self._pool.bytes_per_slot
        self._telemetry.compression("stored" if finite else "non_finite", bytes_in=native, bytes_out=stored)
        if finite:
            self._telemetry.report(verdict.relative_error, verdict.worst_head)
        self._compressed(verdict, finite)
        return finite

    def hang(self, node: Node, slot: CheckpointSlot, hops: int, report: Report, fresh_from: int) -> None:
        """Hang a written slot on its node: published if its report was accepted, pending if that is still to come."""
        birth, fingerprint = self._telemetry.born(), self._pool.fingerprint
        self._tree.checkpoints.attach(node, Checkpoint(slot, node.depth, hops, fingerprint, report, birth, fresh_from))
        if not report.deferred:
            self._tree.publish(node)
            return
        self._tree.kv.watch(node)
        self._pending.append(node)

    def settle_path(self, node: Node, beyond: int) -> bool:
        """Read the pending reports on the path to ``node`` deeper than ``beyond``.

        Returns whether there were any, so that the tree may have changed.
        """
        if not self._pending:
            return False
        on_path = set()
        step: Node | None = node
        while step is not None and step.depth > beyond:
            on_path.add(step)
            step = step.parent
        found = [pending for pending in self._pending if pending in on_path]
        self.settle(found)
        return bool(found)

    def settle(self, nodes: Iterable[Node]) -> None:
        """Read the pending reports of ``nodes``, in the order of their commits: publish what is finite, discard what is not."""
        for node in nodes:
            checkpoint = node.checkpoint
            if checkpoint is None or checkpoint.report is None:
                continue  # went with a poisoned one settled just before
            finite = self.accept(checkpoint.report)
            self._pending.remove(node)
            if finite:
                self._tree.publish(node)
            else:
                self._discard(node, checkpoint)

    def settle_all(self) -> bool:
        """Read every pending report. Whether any there were."""
        pending = list(self._pending)
        self.settle(pending)
        return bool(pending)

    def evict(self, node: Node, reason: EvictionReason) -> int:
        """Give up the checkpoint on ``node``, and the node if it is a leaf. Returns the KV tokens that went with it."""
        with self._telemetry.operation("evict") as operation:
            checkpoint, tokens = self._tree.evict(node)
            if checkpoint is not None:
                self._bury(checkpoint, reason)
            operation.set(pool="checkpoint", reason=reason, forced=reason == "forced", depth=node.depth, tokens=tokens)
        return tokens

    def supersede(self, node: Node) -> None:
        """Give up the checkpoint on ``node`` for a better one of the same prefix; the node stays."""
        with self._telemetry.operation("evict") as operation:
            self._bury(self._tree.checkpoints.detach(node), "hop_cap")
            operation.set(pool="checkpoint", reason="hop_cap", forced=False, depth=node.depth)

    def unlock(self, node: Node) -> None:
        """Undo one lock of a lease. A checkpoint that is out of the tree goes with the last one."""
        self._tree.unlock_checkpoint(node)
        if node.quarantined and node.checkpoint is not None and not node.checkpoint.locks:
            self.evict(node, "guard")

    def evict_leaf(self) -> int | None:
        """Give up the KV of the least recently used leaf, with its checkpoint.

        Returns the tokens freed; None if every leaf is in use.
        """
        node = self._tree.kv.leaves.pop()
        return None if node is None else self.evict(node, "kv_pressure")

    def clear(self) -> tuple[int, int]:
        """Give up everything not in use. Returns the number of checkpoints and of KV tokens freed."""
        self.settle_all()
        checkpoints, tokens = self._tree.clear()
        self._bury_all(checkpoints, "flush")
        return len(checkpoints), tokens

    def start_over(self) -> None:
        """Give up everything, for what is stored is not to be used again. What leases still use lives on apart until they end."""
        self.settle_all()
        self._bury_all(self._tree.start_over(), "guard")

    def free(self, slot: CheckpointSlot, reason: FreeReason) -> None:
        """Give back a slot: the one way in which a checkpoint slot becomes free."""
        with self._telemetry.operation("free") as operation:
            self._pool.slots.free(slot)
            operation.set(pool="checkpoint", reason=reason)
            self._telemetry.freed("checkpoint", reason)

    def check(self) -> None:
        """Raise :class:`InvariantError` unless the pending queue is exactly the pending checkpoints of the tree."""
        nodes = [*self._tree.radix.nodes(), *self._tree.quarantined]
        pending = {node for node in nodes if node.checkpoint is not None and node.checkpoint.report is not None}
        if pending != set(self._pending) or len(pending) != len(self._pending):
            raise InvariantError(f"{len(pending)} pending checkpoints in the tree, {len(self._pending)} in the queue")

    def _discard(self, node: Node, poisoned: Checkpoint) -> None:
        for checkpoint in self._tree.discard(node, poisoned.fresh_from):
            if checkpoint.report is not None and checkpoint is not poisoned:
                self._telemetry.compression("rejected")  # its report will never be read
            self.free(checkpoint.slot, "non_finite")
        self._pending = deque(left for left in self._pending if left.checkpoint is not None)

    def _bury_all(self, checkpoints: Iterable[Checkpoint], reason: EvictionReason) -> None:
        for checkpoint in checkpoints:
            with self._telemetry.operation("evict") as operation:
                self._bury(checkpoint, reason)
                operation.set(pool="checkpoint", reason=reason, forced=False, depth=checkpoint.depth)

    def _bury(self, checkpoint: Checkpoint, reason: EvictionReason) -> None:
        self._telemetry.evicted(reason, checkpoint.reused, checkpoint.birth)
        self.free(checkpoint.slot, "flushed" if reason == "flush" else "evicted")

    def _shortage(self) -> Shortage:
        counts = self._pool.slots.counts
        return "all_locked" if counts.locked == self._pool.slots.capacity else "exhausted"
