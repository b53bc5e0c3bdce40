"""Who runs next, and who waits."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mamba_checkpoint_cache.drift.monitor import Sample
from mamba_checkpoint_cache.results import Match
from mamba_checkpoint_cache.serving.request import Request
from mamba_checkpoint_cache.serving.sampling import Sampler
from mamba_checkpoint_cache.slots import ActiveSlot

if TYPE_CHECKING:
    from mamba_checkpoint_cache.integrations.transformers import Session


@dataclass(slots=True, eq=False)
class Running:
    """A request that has a slot.

    ``sequence``: prompt and output. ``kv``: the KV slots of the tokens that have run; the first ``num_owned`` are the tree's.
    ``ends``: where the steps behind its state ended, from the start of the sequence, also those that other requests took.
    ``donated``: the slot was handed to the cache with the last commit. ``sample``: its logits, if they are to be checked.
    """

    request: Request
    slot: ActiveSlot
    lease: Match
    session: Session
    sampler: Sampler
    sequence: array[int]
    kv: array[int]
    num_owned: int
    ends: array[int] = field(default_factory=lambda: array("i"))
    donated: bool = False
    sample: Sample | None = None

    @property
    def prefilling(self) -> bool:
        """Whether part of the prompt has yet to run."""
        return self.session.depth < len(self.request.tokens)

    def step_end(self, chunk: int) -> int:
        """The depth at which the next step ends: where its chunk does, its branch point or what is known of the sequence.

        Chunks end at absolute multiples of ``chunk``, wherever they start: whoever resumes at such a depth runs the very steps
        that a run from the start would, and gets the same bits.
        """
        begin, branch = self.session.depth, self.lease.branch_depth
        end = min(begin - begin % chunk + chunk, len(self.sequence))
        return branch if branch is not None and begin < branch < end else end

    def worth_checkpoint(self, chunk: int) -> bool:
        """Whether the depth just reached is the end of a whole chunk of the prompt, or its branch point."""
        depth = self.session.depth
        return depth <= len(self.request.tokens) and (depth % chunk == 0 or depth == self.lease.branch_depth)


class Scheduler:
    """First come, first served into the active slots; there, one prefill chunk and then one token each, in turn.

    A request is let in only when the KV of all that run, at their longest, fits the KV slots (``kv_capacity``, None if there are
    none). What the tree holds beyond that can be evicted, so nobody who runs ever waits for KV, let alone for each other.
    """

    def __init__(self, kv_capacity: int | None, max_waiting: int) -> None:
        self.waiting: deque[Request] = deque()
        self.running: deque[Running] = deque()
        self.max_waiting = max_waiting
        self._kv_capacity = kv_capacity

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.waiting and not self.running

    def may_start(self) -> bool:
        """Whether somebody waits whose KV there is room for."""
        if not self.waiting or self._kv_capacity is None:
            return bool(self.waiting)
        promised = sum(longest(running.request) for running in self.running)
        return promised + longest(self.waiting[0]) <= self._kv_capacity

    def turn(self) -> list[Running]:
        """Who runs in this step: the prefill whose last chunk was longest ago, and everyone who decodes."""
        prefill = next((running for running in self.running if running.prefilling), None)
        if prefill is None:
            return list(self.running)
        self.running.remove(prefill)
        self.running.append(prefill)
        return [prefill, *(running for running in self.running if not running.prefilling)]

    def find(self, request: Request) -> Running | None:
        """The running form of a request."""
        return next((running for running in self.running if running.request is request), None)


def longest(request: Request) -> int:
    """The most tokens that a request can come to."""
    return len(request.tokens) + request.sampling.max_new_tokens
