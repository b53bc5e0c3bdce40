"""Who owns what hangs on the tree's nodes: checkpoints in their pool, KV in the engine's."""

from __future__ import annotations

from array import array
from typing import Protocol

from mamba_checkpoint_cache.errors import InvariantError
from mamba_checkpoint_cache.slots import CheckpointSlot, SlotAllocator, SlotState
from mamba_checkpoint_cache.tree.lru import LruQueue
from mamba_checkpoint_cache.tree.node import Checkpoint, Node


class KvAllocator(Protocol):
    """The engine's side of the KV: all that the tree needs of it."""

    def free(self, ids: array[int]) -> None:
        """Take back KV slots that the tree no longer owns, or that the engine gave twice."""
        ...


class Checkpoints:
    """The checkpoints on the tree's nodes, and the state of their slots.

    pending (slot reserved) -> evictable <-> locked -> detached, for the caller to free.
    """

    def __init__(self, slots: SlotAllocator[CheckpointSlot]) -> None:
        self.slots = slots
        self.evictable = LruQueue()

    def attach(self, node: Node, checkpoint: Checkpoint) -> None:
        """Hang a checkpoint whose slot is reserved on the node of exactly its depth; it is pending until published."""
        if node.checkpoint is not None or node.depth != checkpoint.depth:
            raise InvariantError(f"a checkpoint of depth {checkpoint.depth} does not belong on a node of depth {node.depth}")
        node.checkpoint = checkpoint
        node.checkpoint_evicted = False

    def publish(self, node: Node) -> None:
        """A pending checkpoint was found good: let it be matched and evicted."""
        checkpoint = _checkpoint(node)
        checkpoint.report = None
        self.slots.move(checkpoint.slot, SlotState.EVICTABLE)
        self.evictable.add(node)

    def lock(self, node: Node) -> None:
        """Keep a checkpoint from eviction until unlocked as often as it was locked."""
        checkpoint = _checkpoint(node)
        checkpoint.locks += 1
        if checkpoint.locks == 1:
            self.slots.move(checkpoint.slot, SlotState.LOCKED)
            self.evictable.discard(node)

    def unlock(self, node: Node) -> None:
        """Undo one :meth:`lock`; the checkpoint goes back to the place that its last use gives it."""
        checkpoint = _checkpoint(node)
        checkpoint.locks -= 1
        if checkpoint.locks == 0:
            self.slots.move(checkpoint.slot, SlotState.EVICTABLE)
            self.evictable.add(node)

    def detach(self, node: Node) -> Checkpoint:
        """Take an unlocked checkpoint off its node; its slot is the caller's to free."""
        checkpoint = _checkpoint(node)
        if checkpoint.locks:
            raise InvariantError(f"the checkpoint at depth {node.depth} is locked {checkpoint.locks} times")
        self.evictable.discard(node)
        node.checkpoint = None
        return checkpoint


class KvSide:
    """The KV slot ids that the tree owns, and the leaves that may give theirs up."""

    def __init__(self, allocator: KvAllocator | None) -> None:
        self.allocator = allocator
        self.leaves = LruQueue()

    @property
    def present(self) -> bool:
        """Whether the model has KV at all: a pure SSM has not."""
        return self.allocator is not None

    def free(self, ids: array[int]) -> None:
        """Give ids back to the engine."""
        if self.allocator is not None and ids:
            self.allocator.free(ids)

    def watch(self, node: Node) -> None:
        """Keep ``node`` among the evictable leaves exactly while it is one: call it when its children or locks changed."""
        if self.present and node.parent is not None and not node.quarantined and removable(node):
            self.leaves.add(node)
        else:
            self.leaves.discard(node)


def removable(node: Node) -> bool:
    """Whether a node may leave the tree: a leaf without a lease, whose checkpoint nobody is reading or waiting for."""
    checkpoint = node.checkpoint
    return not node.children and not node.locks and (checkpoint is None or (checkpoint.locks == 0 and checkpoint.report is None))


def _checkpoint(node: Node) -> Checkpoint:
    if node.checkpoint is None:
        raise InvariantError(f"expected a checkpoint on the node at depth {node.depth}")
    return node.checkpoint
