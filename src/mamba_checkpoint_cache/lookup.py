"""What of a prompt can be continued from, and why no more of it."""

from __future__ import annotations

from typing import NamedTuple

from mamba_checkpoint_cache.policy import CheckpointPolicy
from mamba_checkpoint_cache.telemetry.catalogue import MissReason
from mamba_checkpoint_cache.tree.node import Node
from mamba_checkpoint_cache.tree.radix_tree import RadixTree, Walk


class Hit(NamedTuple):
    """The node to continue from (the root if there is none), why it is no deeper, and where a checkpoint would help the next."""

    node: Node
    miss: MissReason | None
    branch_depth: int | None


def find_hit(radix: RadixTree, policy: CheckpointPolicy, walk: Walk, key: bytes, limit: int) -> Hit:
    """The deepest usable checkpoint at or above ``limit`` on the path that ``walk`` took for ``key``."""
    node, worn = _deepest_usable(policy, walk.node, limit)
    known = min(walk.matched, limit) if worn is None else worn.depth
    branch_depth = policy.branch_depth(depth=node.depth, matched=known)
    miss = _miss_reason(radix, node, walk, key, limit)
    return Hit(node, "hop_cap" if worn is not None else miss, branch_depth)


def _deepest_usable(policy: CheckpointPolicy, node: Node, limit: int) -> tuple[Node, Node | None]:
    """The node, and the deepest one that was passed over because its state is worn."""
    worn = None
    while node.parent is not None:
        checkpoint = node.checkpoint
        if checkpoint is not None and node.depth <= limit:
            if checkpoint.hops == 0 or (worn is None and not policy.is_worn(checkpoint.hops)):
                return node, worn
            worn = worn or node
        node = node.parent
    return node, worn


def _miss_reason(radix: RadixTree, hit: Node, walk: Walk, key: bytes, limit: int) -> MissReason | None:
    """Why nothing beyond ``hit`` was usable; None if nothing beyond it was ever there."""
    if limit == 0:
        return "too_short"
    if hit.depth == limit:
        return None
    whole_prompt = evicted = False
    node = walk.node
    while node is not hit and node.parent is not None:
        whole_prompt = whole_prompt or node.checkpoint is not None
        evicted = evicted or (node.checkpoint_evicted and node.depth <= limit)
        node = node.parent
    if evicted or radix.remembers(walk, key):
        return "evicted"
    if walk.matched > hit.depth:
        return "whole_prompt" if whole_prompt else "never_checkpointed"
    if hit.depth:
        return None
    return "no_shared_prefix" if radix.root.children else "empty"
