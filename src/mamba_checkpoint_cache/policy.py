"""Where a checkpoint is worth its slot, and which one a long path gives up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mamba_checkpoint_cache.tree.node import Checkpoint, Node


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """What is worth a slot of the checkpoint pool. Pure functions of the tree, so that all ranks decide alike.

    ``min_tokens``: the fewest tokens that a checkpoint must save, counted from the start of the prompt; also the fewest that a
    branch-point checkpoint must save beyond the nearest one above it.
    ``max_per_path``: the most checkpoints on one path from the root; ``None`` means half the pool's slots, at least 2.
    ``max_hops``: the lossy round trips at which a state is worn; ``None`` means never. A worn checkpoint is not continued from: a
    prompt whose deepest checkpoint is worn goes back to the nearest exact one (no hops), or to its very beginning, and runs from
    there. What it commits on the way takes the place of the worn states, and starts counting anew. So no state that is restored
    has as many as ``max_hops`` hops, and a conversation is recomputed about once in ``max_hops`` turns.

    Raises:
        ValueError: if ``min_tokens`` is under 1, or ``max_per_path`` or ``max_hops`` under 2.
    """

    min_tokens: int = 1
    max_per_path: int | None = None
    max_hops: int | None = None

    def __post_init__(self) -> None:
        if self.min_tokens < 1:
            raise ValueError(f"min_tokens must be at least 1, got {self.min_tokens}")
        if self.max_per_path is not None and self.max_per_path < 2:
            raise ValueError(f"max_per_path must be at least 2 (the tail and one above it), got {self.max_per_path}")
        if self.max_hops is not None and self.max_hops < 2:
            raise ValueError(f"max_hops must be at least 2 (a lossy codec's checkpoints all have 1 or more), got {self.max_hops}")

    def path_cap(self, slots: int) -> int:
        """The most checkpoints on one path, in a pool of ``slots`` slots."""
        return self.max_per_path if self.max_per_path is not None else max(2, slots // 2)

    def is_worn(self, hops: int) -> bool:
        """Whether a state with so many lossy round trips behind it is one too many to go on from."""
        return self.max_hops is not None and hops >= self.max_hops

    def branch_depth(self, *, depth: int, matched: int) -> int | None:
        """The depth worth a checkpoint on the way, when tokens up to ``matched`` are known but only ``depth`` can be restored.

        Somebody else went the same way to ``matched``: whoever comes third will find the checkpoint.
        """
        return matched if matched - depth >= self.min_tokens else None

    def thin_out(self, path: Sequence[Node]) -> Node | None:
        """Which checkpoint a full path gives up: the one whose neighbours above and below are closest together.

        ``path`` holds the path's nodes with checkpoints, shallowest first. Never the tail, nor the one above it, which is what
        the same prompt finds when it is sent again; never a fork or a locked one. None if that leaves nothing.
        """
        candidates = [
            (below.depth - (above.depth if above else 0), node.depth, node)
            for above, node, below in zip((None, *path[:-3]), path[:-2], path[1:-1], strict=True)
            if len(node.children) == 1 and _unlocked(node.checkpoint)
        ]
        return min(candidates)[2] if candidates else None


def _unlocked(checkpoint: Checkpoint | None) -> bool:
    return checkpoint is not None and checkpoint.report is None and checkpoint.locks == 0
