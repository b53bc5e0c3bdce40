"""The reference engine's part in the sampled logit check: it notes the steps, hands over logits, and finds the time."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from mamba_checkpoint_cache.drift.monitor import CheckedCache, DriftMonitor, Recompute
from mamba_checkpoint_cache.results import Match
from mamba_checkpoint_cache.serving.recompute import Recomputation
from mamba_checkpoint_cache.serving.request import Finish
from mamba_checkpoint_cache.serving.scheduler import Running

if TYPE_CHECKING:
    from mamba_checkpoint_cache.integrations.transformers import HybridModel

BUSY_SHARE = 0.02
"""How much of its time an engine that is never idle gives to checks."""


class StepHistory:
    """In what steps the state of each checkpoint was computed, from the start of its sequence.

    Other steps give other last bits: only a recomputation in the same ones shows what the cache did and nothing else.
    """

    def __init__(self) -> None:
        self._ends: dict[int, array[int]] = {}

    def of(self, lease: Match) -> array[int]:
        """Where the steps behind a matched state ended, its depth last; as one step if they are not known."""
        if not lease.depth:
            return array("i")
        checkpoint = lease.node.checkpoint
        known = None if checkpoint is None else self._ends.get(checkpoint.slot.index)
        return array("i", [lease.depth]) if known is None else known[:]

    def keep(self, lease: Match, ends: Sequence[int]) -> None:
        """Note the steps behind the checkpoint that was just stored under ``lease``."""
        if lease.node.checkpoint is not None:
            self._ends[lease.node.checkpoint.slot.index] = array("i", ends)


class DriftChecks:
    """Follows each request through the engine, and recomputes one at a time of those that the monitor samples.

    Checks run when the engine is idle, and otherwise for ``BUSY_SHARE`` of the time, so that drift is seen on a server that
    never rests as well; a slice is one step of one request, so no request ever waits for more. With ``rate`` 0 there are none,
    nothing is followed, and no memory is set aside for them. ``clock`` gives seconds.
    """

    def __init__(
        self, model: HybridModel, cache: CheckedCache, *, rate: float, per_minute: int, clock: Callable[[], float]
    ) -> None:
        self._monitor = DriftMonitor(cache, rate=rate, per_minute=per_minute, clock=clock)
        self._recomputation = Recomputation(model) if rate else None
        self._history = StepHistory()
        self._clock = clock
        self._due = clock()

    @property
    def pending(self) -> bool:
        """Whether there is a check to go on with."""
        return self._monitor.checking

    def started(self, running: Running) -> None:
        """A request was matched and restored. Prompt logits are computed in one go, in other last bits: not sampled."""
        if self._recomputation is None:
            return
        running.ends = self._history.of(running.lease)
        if running.lease.depth and not running.request.wants_prompt_logprobs:
            running.sample = self._monitor.sample()

    def ran(self, running: Running, logits: Tensor) -> None:
        """A request took a step; ``logits`` ``[vocabulary]`` are those after it."""
        if self._recomputation is None:
            return
        running.ends.append(running.session.depth)
        if running.sample is not None and not running.prefilling and running.sample.add(running.session.depth, logits):
            self._begin(running)

    def stored(self, running: Running) -> None:
        """The state of a request became a checkpoint."""
        if self._recomputation is not None:
            self._history.keep(running.lease, running.ends)

    def ended(self, running: Running, finish: Finish) -> None:
        """A request is over; what was sampled of one that failed or was aborted is dropped."""
        if running.sample is None:
            return
        if finish.reason in {"stop", "length"}:
            self._begin(running)
        else:
            self._monitor.drop(running.sample)
            running.sample = None

    def step(self, *, idle: bool) -> None:
        """Run a slice of the check under way, if there is one and it is due."""
        if not self._monitor.checking:
            return
        began = self._clock()
        if idle or began >= self._due:
            self._monitor.step()
            ended = self._clock()
            self._due = ended + (ended - began) * (1 / BUSY_SHARE - 1)

    def _begin(self, running: Running) -> None:
        sample, running.sample = running.sample, None
        if sample is not None and self._recomputation is not None:
            recompute: Recompute = partial(self._recomputation.run, ends=running.ends[:])
            self._monitor.check(sample, running.sequence[: sample.depths[-1]], recompute)
