"""Which prefix owns which slots: the radix tree with its checkpoints and its KV. Knows nothing of tensors or telemetry."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from mamba_checkpoint_cache.errors import InvariantError
from mamba_checkpoint_cache.slots import CheckpointSlot, SlotAllocator, SlotState
from mamba_checkpoint_cache.tree.components import Checkpoints, KvAllocator, KvSide, removable
from mamba_checkpoint_cache.tree.node import Checkpoint, Node
from mamba_checkpoint_cache.tree.radix_tree import RadixTree, Walk


class Insertion(NamedTuple):
    """A node for a prefix, and the depth from which the KV came with this insertion."""

    node: Node
    fresh_from: int


class PrefixTree:
    """Prefixes, and the checkpoints and KV slots that hang on them.

    Only leaves leave the tree, so a lease on a node keeps its whole path. With a KV side every node has the KV of its edge;
    without one, a leaf without checkpoint and lease is nothing and is removed at once.
    """

    def __init__(self, slots: SlotAllocator[CheckpointSlot], kv: KvAllocator | None, page_size: int) -> None:
        self.radix = RadixTree(page_size)
        self.checkpoints = Checkpoints(slots)
        self.kv = KvSide(kv)
        self.quarantined: set[Node] = set()
        self._quarantined_kv: set[int] = set()
        self._now = 0

    def insert(self, key: bytes, kv: array[int]) -> Insertion:
        """The node that ends where ``key`` ends, now the most recently used.

        What is new of ``kv`` is the tree's from here on; what the tree has already, under other ids, is freed.
        """
        walk = self.radix.walk(key)
        self._free_duplicates(walk, kv)
        node = self.radix.extend(walk, key, kv)
        self.touch(node)
        self.kv.watch(node)
        if node.parent is not None:
            self.kv.watch(node.parent)
        return Insertion(node, walk.matched)

    def path_kv(self, node: Node) -> array[int]:
        """The KV slot ids from the root to the end of ``node``; empty without a KV side."""
        parts = []
        step: Node | None = node
        while step is not None:
            parts.append(step.kv)
            step = step.parent
        return array("i", b"".join(parts[::-1]))

    def is_quarantined(self, kv: array[int]) -> bool:
        """Whether any of these KV slots is the tree's already, with content that is not to be used again."""
        return bool(self._quarantined_kv) and not self._quarantined_kv.isdisjoint(kv)

    def touch(self, node: Node) -> None:
        """Make ``node``, and no other, the most recently used."""
        self._now += 1
        node.last_use = self._now
        self.checkpoints.evictable.move(node)
        self.kv.leaves.move(node)

    def lease(self, node: Node) -> None:
        """Keep ``node``, and with it its path, until the lease ends."""
        node.locks += 1
        self.kv.leaves.discard(node)

    def end_lease(self, node: Node) -> None:
        """Undo one :meth:`lease`."""
        node.locks -= 1
        self._settle_down(node)

    def lock_checkpoint(self, node: Node) -> None:
        """Keep the checkpoint on a leased ``node`` until it is unlocked; that makes it, and no other, the most recently used."""
        self._now += 1
        node.last_use = self._now
        self.checkpoints.lock(node)

    def unlock_checkpoint(self, node: Node) -> None:
        """Undo one :meth:`lock_checkpoint`."""
        self.checkpoints.unlock(node)
        self._settle_down(node)

    def publish(self, node: Node) -> None:
        """The pending checkpoint on ``node`` was found good."""
        self.checkpoints.publish(node)
        self.kv.watch(node)

    def evict(self, node: Node) -> tuple[Checkpoint | None, int]:
        """Take the checkpoint off ``node``; a leaf goes with it, and so do ancestors that lead nowhere then.

        Returns the checkpoint, whose slot is to be freed, and the number of KV tokens freed. A leaf of KV alone has none.
        """
        checkpoint = None
        if node.checkpoint is not None:
            checkpoint = self.checkpoints.detach(node)
            node.checkpoint_evicted = True
        tokens = self._remove_upwards(node, remember=True)
        self.kv.watch(node)
        return checkpoint, tokens

    def discard(self, node: Node, fresh_from: int) -> list[Checkpoint]:
        """Take off a pending checkpoint that was found poisoned, and cut off whatever relies on KV that came with it.

        Returns the checkpoints taken off, the poisoned one first; their slots are to be freed. What a lease still uses lives
        on, out of the tree, until the lease ends.
        """
        taken = [self.checkpoints.detach(node)]
        if not self.kv.present or fresh_from >= node.depth:
            self._settle_down(node)
            return taken
        top = node
        while top.parent is not None and top.parent.depth > fresh_from:
            top = top.parent
        members = self._cut_off(top)
        taken += [self.checkpoints.detach(member) for member in members if member.checkpoint is not None]
        for member in reversed(members):
            if member in self.quarantined:  # else it went with a child
                self._settle_down(member)
        return taken

    def clear(self) -> tuple[list[Checkpoint], int]:
        """Remove all that is not in use. Returns the checkpoints, whose slots are to be freed, and the KV tokens freed."""
        taken, tokens = [], 0
        for node in reversed(list(self.radix.nodes())):
            if node.checkpoint is not None and node.checkpoint.report is None and not node.checkpoint.locks:
                taken.append(self.checkpoints.detach(node))
            if node.checkpoint is None:
                tokens += self._remove(node) if removable(node) else 0
            self.kv.watch(node)
            node.ghosts.clear()
        self.radix.root.ghosts.clear()
        return taken, tokens

    def start_over(self) -> list[Checkpoint]:
        """Empty the tree: what is in use goes into quarantine, the rest is removed.

        Returns the checkpoints taken off, whose slots are to be freed. Those that are locked stay on their nodes until then.
        """
        taken, _ = self.clear()
        for top in list(self.radix.root.children.values()):
            self._cut_off(top)
        return taken

    def check(self) -> None:
        """Raise :class:`InvariantError` unless nodes, slots, KV and queues agree."""
        self.radix.check()
        self.checkpoints.slots.check()
        nodes = [*self.radix.nodes(), *self.quarantined]
        held = [node for node in nodes if node.checkpoint is not None]
        if len({node.checkpoint.slot.index for node in held if node.checkpoint}) != len(held):
            raise InvariantError("a slot hangs on two nodes")
        if self.checkpoints.slots.counts.free != self.checkpoints.slots.capacity - len(held):
            raise InvariantError(f"{len(held)} checkpoints in the tree, but {self.checkpoints.slots.counts} in the pool")
        owned = [i for node in nodes for i in node.kv]
        if len(set(owned)) != len(owned):
            raise InvariantError("a KV slot is owned by two nodes")
        for node in nodes:
            self._check_node(node)

    def _check_node(self, node: Node) -> None:
        where = f"node at depth {node.depth}"
        if len(node.kv) != (node.depth - node.start if self.kv.present else 0):
            raise InvariantError(f"{where}: {len(node.kv)} KV slots for {node.depth - node.start} tokens")
        if not self.kv.present and removable(node) and node.checkpoint is None:
            raise InvariantError(f"{where}: leads nowhere")
        if (node in self.kv.leaves) != (self.kv.present and removable(node) and not node.quarantined):
            raise InvariantError(f"{where}: wrongly {'in' if node in self.kv.leaves else 'missing from'} the evictable leaves")
        if node.quarantined and removable(node):
            raise InvariantError(f"{where}: quarantined, and nobody uses it")
        self._check_checkpoint(node)

    def _check_checkpoint(self, node: Node) -> None:
        checkpoint = node.checkpoint
        if checkpoint is None:
            if node in self.checkpoints.evictable:
                raise InvariantError(f"node at depth {node.depth}: evictable without a checkpoint")
            return
        if checkpoint.depth != node.depth:
            raise InvariantError(f"a checkpoint of depth {checkpoint.depth} hangs at depth {node.depth}")
        state = SlotState.RESERVED if checkpoint.report else SlotState.LOCKED if checkpoint.locks else SlotState.EVICTABLE
        if self.checkpoints.slots.state(checkpoint.slot) is not state:
            raise InvariantError(f"{checkpoint.slot!r} should be {state.name}")
        if (node in self.checkpoints.evictable) != (state is SlotState.EVICTABLE):
            raise InvariantError(f"{checkpoint.slot!r} is {state.name}, and the eviction queue disagrees")

    def _free_duplicates(self, walk: Walk, kv: array[int]) -> None:
        if not self.kv.present:
            return
        duplicates = array("i")
        known = self.path_kv(walk.node)
        if walk.partial is not None:
            known.extend(walk.partial.kv[: walk.matched - walk.node.depth])
        if known != kv[: walk.matched]:
            duplicates.extend(given for given, owned in zip(kv, known, strict=False) if given != owned)
        self.kv.free(duplicates)

    def _settle_down(self, node: Node) -> None:
        """After a lock or a checkpoint went: remove what leads nowhere, and list what can be evicted now."""
        if node.checkpoint is None and (node.quarantined or not self.kv.present):
            self._remove_upwards(node, remember=False)
        self.kv.watch(node)

    def _cut_off(self, top: Node) -> list[Node]:
        """Put ``top`` and all below it in quarantine. Returns them, parents before children."""
        self.radix.detach(top)
        top.cut_off = True
        if top.parent is not None:
            self.lease(top.parent)
        members = [top, *self.radix.below(top)]
        for member in members:
            member.quarantined = True
            self._quarantined_kv.update(member.kv)
        self.quarantined.update(members)
        return members

    def _remove_upwards(self, node: Node, *, remember: bool) -> int:
        """Remove ``node`` if it may leave and has no checkpoint, then its ancestors likewise. Returns the KV tokens freed."""
        tokens = 0
        step: Node | None = node
        while step is not None and step is not self.radix.root and step.checkpoint is None and removable(step):
            parent, reachable = step.parent, not step.cut_off
            if remember and not step.quarantined:
                self.radix.remember(step)
            tokens += self._remove(step)
            if not reachable and parent is not None:
                self.end_lease(parent)
                return tokens
            step = parent
        if step is not None:
            self.kv.watch(step)
        return tokens

    def _remove(self, leaf: Node) -> int:
        if not leaf.cut_off:
            self.radix.remove(leaf)
        leaf.parent = None
        self.kv.leaves.discard(leaf)
        if leaf.quarantined:
            self.quarantined.discard(leaf)
            self._quarantined_kv.difference_update(leaf.kv)
        self.kv.free(leaf.kv)
        return len(leaf.kv)
