"""A node of the radix tree, and the checkpoint that may hang on it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mamba_checkpoint_cache.codec.report import Report
    from mamba_checkpoint_cache.slots import CheckpointSlot

_serials = count()


@dataclass(slots=True, eq=False)
class Checkpoint:
    """One compressed state and what is known about it.

    ``depth`` is the number of tokens the state has seen, ``hops`` the number of lossy round trips behind its content.
    ``report`` is the codec's report while nobody has read it: until then the checkpoint is pending.
    ``fresh_from`` is the depth from which the commit that stored it also brought the KV.
    """

    slot: CheckpointSlot
    depth: int
    hops: int
    fingerprint: str
    report: Report | None
    birth: object
    fresh_from: int
    locks: int = 0
    reused: bool = False


@dataclass(slots=True, eq=False)
class Node:
    """The tokens of one edge and what belongs to their end.

    ``key`` holds the edge's tokens as packed int32, ``depth`` the number of tokens from the root to the edge's end, ``kv``
    the KV slot ids of the edge's tokens (empty without a KV side), ``locks`` the number of leases that end here. A leased
    node keeps its ancestors too, because only leaves are ever removed.
    """

    key: bytes
    depth: int
    parent: Node | None
    kv: array[int]
    children: dict[bytes, Node] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    locks: int = 0
    last_use: int = 0
    checkpoint_evicted: bool = False
    """A checkpoint stood here and was evicted: says why a later match finds nothing."""
    quarantined: bool = False
    """Out of the tree because its content is not to be used again; lives on until its last lease ends."""
    cut_off: bool = False
    """The top of a quarantined subtree. It still counts as a lease on its parent, whose KV those in quarantine build on."""
    ghosts: dict[bytes, None] = field(default_factory=dict)
    """How the edges began that once hung here and were evicted with their checkpoints."""
    serial: int = field(default_factory=_serials.__next__)

    @property
    def start(self) -> int:
        """Tokens from the root to the start of the edge."""
        return self.depth - len(self.key) // 4
