"""Nodes by the time of their last use."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from mamba_checkpoint_cache.tree.node import Node


class LruQueue:
    """The nodes that may be evicted, least recently used first.

    A heap rather than a linked list: a node joins with the recency it has (a parent that has just become a leaf, a checkpoint
    that has just been unlocked), not at an end. Entries of nodes that left or changed are skipped when they surface.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []
        self._members: dict[Node, int] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, node: Node) -> bool:
        return node in self._members

    def add(self, node: Node) -> None:
        """Let ``node`` be evicted in the order of its ``last_use``."""
        if self._members.get(node) == node.last_use:
            return
        self._members[node] = node.last_use
        heappush(self._heap, (node.last_use, node.serial, node))
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [(stamp, node.serial, node) for node, stamp in self._members.items()]
            heapify(self._heap)

    def move(self, node: Node) -> None:
        """The ``last_use`` of ``node`` has changed: put it where that belongs, if it is here."""
        if node in self._members:
            self.add(node)

    def discard(self, node: Node) -> None:
        """Let ``node`` no longer be evicted."""
        self._members.pop(node, None)

    def pop(self) -> Node | None:
        """Take out the least recently used node; None if there is none."""
        while self._heap:
            stamp, _, node = heappop(self._heap)
            if self._members.get(node) == stamp:
                del self._members[node]
                return node
        return None
