"""What the drift guard learns of the cache, and what its mode does to the checkpoint pool."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal

import torch

from mamba_checkpoint_cache.codec import Codec, get_codec
from mamba_checkpoint_cache.codec.layered import codecs_by_layer, layered
from mamba_checkpoint_cache.codec.report import Report, Verdict
from mamba_checkpoint_cache.drift.budget import DriftBudget
from mamba_checkpoint_cache.drift.guard import DriftGuard, GuardChange
from mamba_checkpoint_cache.drift.logits import LogitComparison
from mamba_checkpoint_cache.lifecycle import CheckpointLifecycle
from mamba_checkpoint_cache.pools import ActivePool, CheckpointPool
from mamba_checkpoint_cache.slots import ActiveSlot
from mamba_checkpoint_cache.telemetry.catalogue import GuardMode
from mamba_checkpoint_cache.telemetry.recorder import NullTelemetry, Telemetry


class Degradation:
    """Tells the guard what happens, and follows it: with each change of mode, or of what is kept native, the cache starts over.

    The guard may change in the middle of a call. The cache follows before the next match or commit, or after a flush, so that no
    call sees two layouts of the pool. Starting over empties the tree; the pool is laid out anew once every slot is
    free, which is at once unless a lease has yet to restore its checkpoint. Until then nothing is stored. ``epoch`` counts the
    changes: what builds on a state or on KV of an earlier epoch may be suspect, and is not stored.

    ``agree`` is asked once whether a compression is within budget, and once for each layer that is still compressed if it is not.

    With a guard it takes the memory of one compressed state beside the pool's, for trials.
    """

    def __init__(
        self,
        guard: DriftGuard | None,
        pool: CheckpointPool,
        telemetry: Telemetry | NullTelemetry,
        agree: Callable[[bool], bool] | None,
    ) -> None:
        self.epoch = 0
        self._guard = guard
        self._pool = pool
        self._telemetry = telemetry
        self._agree = agree or bool
        self._codec = pool.codec
        self._followed: tuple[GuardMode, frozenset[int]] = ("normal", frozenset())
        self._laid_out = True
        self._trials: list[Report | None] = []
        if guard is not None:
            self._native = get_codec("none", pool.device)
            self._by_layer = codecs_by_layer(pool.codec, pool.spec.num_layers)
            self._row = pool.codec.allocate(pool.spec, 1, pool.device)
            lossy = [layer for layer, codec in enumerate(self._by_layer) if codec.lossy]
            guard.layers = frozenset(lossy or range(pool.spec.num_layers))
            if not lossy or pool.slots_in_place(self._native) < 1:
                guard.action = "stop"

    @property
    def mode(self) -> GuardMode | None:
        """The guard's mode; None without a guard."""
        return None if self._guard is None else self._guard.mode

    @property
    def ceilings(self) -> dict[str, float]:
        """The ceilings of the guard's budget; none without a guard."""
        return {} if self._guard is None else self._guard.budget.ceilings

    def refuses(self, epoch: int) -> bool:
        """Whether nothing is to be stored now of a request that was matched in ``epoch``."""
        return epoch != self.epoch or not self._laid_out or self._followed[0] == "stopped"

    def follow(self, lifecycle: CheckpointLifecycle) -> None:
        """Do what the guard's mode asks for, as far as that is possible by now."""
        if self._guard is None or (self._laid_out and self._follows(self._guard)):
            return
        if not self._follows(self._guard):
            lifecycle.start_over()
            self._followed = (self._guard.mode, self._guard.native)
            self._laid_out = False
            self.epoch += 1
        if self._pool.slots.counts.free == self._pool.slots.capacity:
            codec = self._codec_with(self._guard.native)
            if codec.name != self._pool.codec.name:
                self._pool.relayout(codec)
            self._laid_out = True

    def _follows(self, guard: DriftGuard) -> bool:
        return self._followed == (guard.mode, guard.native)

    def _codec_with(self, native: Collection[int]) -> Codec:
        """The codec that was configured, but for the layers in ``native``."""
        return layered([self._native if layer in native else codec for layer, codec in enumerate(self._by_layer)])

    def compressed(self, verdict: Verdict, finite: bool) -> None:
        """The report of one compression was read; ``finite`` is what all ranks agreed on."""
        if self._guard is not None and self._guard.compressed and self._follows(self._guard):
            self._tell(self._guard.compression(self._over(verdict, finite, self._guard)))

    def _over(self, verdict: Verdict, finite: bool, guard: DriftGuard) -> Collection[int]:
        """The layers that are over budget on any rank; all of them if the state is not finite, which is no codec's merit."""
        if not finite:
            return guard.compressed
        layers = sorted(guard.compressed)
        within = {layer: guard.budget.holds_error(verdict.layer_errors[layer]) for layer in layers}
        if self._agree(all(within.values())):
            return ()
        return [layer for layer in layers if not self._agree(within[layer])]

    def checked(self, result: LogitComparison | Literal["failed", "skipped"]) -> None:
        """A sampled logit check ended."""
        if not isinstance(result, LogitComparison):
            self._telemetry.checked(result)
            return
        budget = DriftBudget() if self._guard is None else self._guard.budget
        within = budget.holds_kl(result.mean_kl_nats)
        self._telemetry.checked("ok" if within else "over_budget", kl_nats=result.kl_nats, agreed=result.agreed)
        if self._guard is not None:
            self._tell(self._guard.check(within))

    def committed(self, source: ActivePool, slot: ActiveSlot, ready: torch.cuda.Event | None) -> None:
        """A commit offers the state in ``slot``: while degraded, every so often, it is tried on the codec too.

        A trial's report is read at the next one: on a GPU it has long arrived by then.
        """
        if self._guard is None:
            return
        self._tell(self._guard.commit())
        if self._guard.trial_due:
            for report in self._trials:
                self._guard.trial(self._agree(report is not None and self._holds(report.verdict())))
            self._trials = [self._try(source, slot, ready)]

    def _try(self, source: ActivePool, slot: ActiveSlot, ready: torch.cuda.Event | None) -> Report | None:
        """What the codec reports on the state in ``slot``; None if it failed, which is no fault of the request."""
        try:
            if ready is not None:
                torch.cuda.current_stream(source.state.device).wait_event(ready)
            return Report(self._codec.compress(source.state, (slot.index,), self._row, (0,)))
        except Exception:  # noqa: BLE001
            self._telemetry.compression("rejected")
            return None

    def _holds(self, verdict: Verdict) -> bool:
        if verdict.finite and self._guard is not None:
            self._telemetry.report(verdict.relative_error, verdict.worst_head)
            return all(map(self._guard.budget.holds_error, verdict.layer_errors))
        return False

    def _tell(self, change: GuardChange | None) -> None:
        if change is not None and self._guard is not None:
            self._trials.clear()
            codec = self._codec_with(self._guard.native).name
            self._telemetry.guard_changed(change.to, cause=change.cause, commits=change.commits, codec=codec)
