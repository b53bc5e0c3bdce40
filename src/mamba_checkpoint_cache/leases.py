"""What running requests hold in the tree: the prefix they matched, and its checkpoint until they have restored it."""

from __future__ import annotations

from collections import Counter

from mamba_checkpoint_cache.errors import HandleError, InvariantError
from mamba_checkpoint_cache.lifecycle import CheckpointLifecycle
from mamba_checkpoint_cache.lookup import Hit
from mamba_checkpoint_cache.results import Match
from mamba_checkpoint_cache.tree.node import Node
from mamba_checkpoint_cache.tree.prefix_tree import PrefixTree


class Leases:
    """The live matches of one cache, and the locks that they hold."""

    def __init__(self, tree: PrefixTree, lifecycle: CheckpointLifecycle) -> None:
        self._tree = tree
        self._lifecycle = lifecycle
        self._live: set[Match] = set()

    def begin(self, hit: Hit, matched: int, epoch: int) -> Match:
        """Lease what was found, of a prompt of which ``matched`` tokens are known to the tree."""
        node, checkpoint = hit.node, hit.node.checkpoint
        match = Match(
            depth=node.depth,
            kv=self._tree.path_kv(node),
            matched=matched,
            miss=hit.miss,
            branch_depth=hit.branch_depth,
            hops=checkpoint.hops if checkpoint else 0,
            epoch=epoch,
            node=node,
            restorable=checkpoint is not None,
        )
        self._tree.lease(node)
        if checkpoint is not None:
            self._tree.lock_checkpoint(node)
        self._live.add(match)
        return match

    def require(self, match: Match) -> None:
        """Raise :class:`HandleError` unless ``match`` is a live lease of this cache."""
        if match not in self._live:
            raise HandleError("expected a live lease of this cache, got one released or another cache's: match the prompt again")

    def unlock(self, match: Match) -> None:
        """Let the matched checkpoint be evicted again, if the lease still holds it."""
        if match.restorable:
            match.restorable = False
            self._lifecycle.unlock(match.node)

    def move(self, match: Match, node: Node) -> None:
        """From here on the lease keeps the path to ``node``."""
        self.unlock(match)
        self._tree.lease(node)
        self._tree.end_lease(match.node)
        match.node = node

    def end(self, match: Match) -> None:
        """Give up all that the lease holds."""
        self.unlock(match)
        self._tree.end_lease(match.node)
        self._live.discard(match)

    def check(self) -> None:
        """Raise :class:`InvariantError` unless the tree's locks are exactly those that leases and quarantined nodes hold."""
        leases = Counter(match.node for match in self._live)
        leases.update(node.parent for node in self._tree.quarantined if node.cut_off and node.parent is not None)
        locks = Counter(match.node for match in self._live if match.restorable)
        for node in (*self._tree.radix.nodes(), *self._tree.quarantined):
            held = node.checkpoint.locks if node.checkpoint else 0
            if node.locks != leases[node] or held != locks[node]:
                raise InvariantError(
                    f"node at depth {node.depth}: {node.locks} locks for {leases[node]} leases, "
                    f"{held} checkpoint locks for {locks[node]} restores to come"
                )
