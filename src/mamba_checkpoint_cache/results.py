"""What the cache answers: leases, outcomes of commits, what a flush freed."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import ClassVar

from mamba_checkpoint_cache.telemetry.catalogue import CommitOutcome, MissReason, SkipReason
from mamba_checkpoint_cache.telemetry.tracing import Trace
from mamba_checkpoint_cache.tree.node import Node


@dataclass(slots=True, eq=False)
class Match:
    """A lease on the longest usable prefix of a prompt, from ``match_prefix`` until ``release``.

    ``depth``: tokens whose state and KV can be reused; at most all but the last. ``kv``: the KV slot ids of those tokens.
    ``matched``: tokens known to the tree; beyond ``depth`` they have no checkpoint to continue from.
    ``miss``: why nothing, or nothing deeper, was usable; None if nothing stood in the way.
    ``branch_depth``: a depth between ``depth`` and the end of the prompt where a checkpoint would serve whoever comes next.
    ``hops``: lossy round trips behind the state that ``restore`` gives. ``epoch``: how often the drift guard's mode had changed.
    """

    depth: int
    kv: array[int]
    matched: int
    miss: MissReason | None
    branch_depth: int | None
    hops: int
    epoch: int
    node: Node
    """Where the lease stands in the tree; it moves with each commit made under it."""
    restorable: bool
    """The checkpoint is locked for this lease, until it is restored or the lease moves on."""
    trace: Trace | None = None
    """What the spans of restores and commits under this lease continue, where no other trace is current."""


@dataclass(frozen=True, slots=True)
class Committed:
    """The outcome of a commit.

    ``depth``: the true depth of the state that was offered. ``kv``: the KV slot ids that the tree now owns for the first
    ``len(kv)`` tokens. Where they differ from those given, those given have been freed: use these instead.
    """

    depth: int
    kv: array[int]


@dataclass(frozen=True, slots=True)
class Stored(Committed):
    """The state is in the pool. On a GPU it can still turn out not to be finite, and is then dropped unseen."""

    outcome: ClassVar[CommitOutcome] = "stored"


@dataclass(frozen=True, slots=True)
class Duplicate(Committed):
    """A checkpoint of exactly this prefix was there already; no slot was touched."""

    outcome: ClassVar[CommitOutcome] = "duplicate"


@dataclass(frozen=True, slots=True)
class Skipped(Committed):
    """Nothing was stored, and serving goes on: ``reason`` says why."""

    reason: SkipReason
    outcome: ClassVar[CommitOutcome] = "skipped"


@dataclass(frozen=True, slots=True)
class FlushResult:
    """What a flush freed: checkpoints, and tokens of KV."""

    checkpoints: int
    kv_tokens: int
