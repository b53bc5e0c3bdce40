"""The drift guard: when compressed states are over their budget for too long, which layers, and when they may be tried again."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sized
from typing import Literal, NamedTuple, get_args

from mamba_checkpoint_cache.drift.budget import DriftBudget
from mamba_checkpoint_cache.telemetry.catalogue import GuardMode

GuardAction = Literal["native", "stop"]
Evidence = Literal["compressions", "checks", "trials"]

MAX_DOUBLINGS = 6
"""How often the wait for a recovery doubles at most: sixty-four times as long, by default 16,384 commits."""


class GuardChange(NamedTuple):
    """A new mode, or further layers that are kept native; what brought it about, and the commits since the change before."""

    to: GuardMode
    cause: Evidence
    commits: int


class DriftGuard:
    """Takes a lossy codec out of service while it is over ``budget``, and puts it back with hysteresis, like a circuit breaker.

    ``mode`` is ``normal``; ``native``, where the recurrent layers in ``native`` are kept in their native dtype; or ``stopped``,
    where no states are kept. ``action`` says which of the two a degradation leads to. The cache that it serves sets ``layers``,
    the recurrent layers to watch, and sets ``action`` to ``stop`` where its pool could not hold one native state, or holds native
    states already.

    A degradation comes as soon as at least half of a full window of compressions, or of logit checks, is over budget; a
    compression is if any of its layers is. Compressions tell which layers drift: those most often over budget are kept native,
    and no more than it takes to have less than half of the window over; the others stay compressed, and may follow. Logits don't
    tell: all layers are kept native then.

    Back to normal, with all layers: once ``recover_after`` commits have passed since the last change and a full window of trials
    was within budget without exception. A trial runs the codec on a state that is being committed, and throws away what comes of
    it. Trials don't see drift that only logits show: the codec is then simply tried again. Until it has proved itself, by
    ``recover_after`` commits and a full window within budget of what it failed on, another degradation doubles the wait, up to
    sixty-four times.

    A pure function of the calls made on it: ranks that make the same calls change together. One guard serves one cache, which
    makes all of them; an engine only reads ``mode`` and ``native``.

    Raises:
        ValueError: if ``action`` is unknown.
    """

    def __init__(self, budget: DriftBudget | None = None, action: GuardAction = "native") -> None:
        if action not in get_args(GuardAction):
            raise ValueError(f"expected a guard's action out of {get_args(GuardAction)}, got {action!r}")
        self.budget = budget or DriftBudget()
        self.action = action
        self.mode: GuardMode = "normal"
        self.layers: frozenset[int] = frozenset()
        self.native: frozenset[int] = frozenset()
        self._compressions: deque[frozenset[int]] = deque(maxlen=self.budget.window)
        self._checks: deque[bool] = deque(maxlen=self.budget.checks)
        self._trials: deque[bool] = deque(maxlen=self.budget.window)
        self._cause: Evidence = "compressions"
        self._commits = 0
        self._wait = self.budget.recover_after
        self._proven = True

    @property
    def compressed(self) -> frozenset[int]:
        """The layers to watch that the codec has in its charge now."""
        return frozenset() if self.mode == "stopped" else self.layers - self.native

    @property
    def trial_due(self) -> bool:
        """Whether the state that is being committed should also be given to the codec as a trial.

        So often that a full window of trials, each read at the next one, has come in when the shortest wait ends.
        """
        every = max(1, (self.budget.recover_after - 1) // (self.budget.window + 1))
        return self.mode != "normal" and self._commits % every == 0

    def compression(self, over: Collection[int]) -> GuardChange | None:
        """The layers of one compression that were over budget. Only those count that the codec has in its charge."""
        if not self.compressed:
            return None
        self._compressions.append(self.compressed.intersection(over))
        if self._judge("compressions", self._compressions):
            return self._degrade("compressions", _drifting(self._compressions))
        return None

    def check(self, within: bool) -> GuardChange | None:
        """The verdict on one logit check. Ignored where nothing is compressed: it is not compressed states that it tells of."""
        if not self.compressed:
            return None
        self._checks.append(not within)
        return self._degrade("checks", self.compressed) if self._judge("checks", self._checks) else None

    def trial(self, within: bool) -> None:
        """The verdict on one trial."""
        self._trials.append(within)

    def commit(self) -> GuardChange | None:
        """A commit offers a state."""
        self._commits += 1
        waited = self.mode != "normal" and self._commits >= self._wait
        if waited and len(self._trials) == self._trials.maxlen and all(self._trials):
            self._proven = False
            return self._change("normal", "trials", frozenset())
        return None

    def _judge(self, evidence: Evidence, window: deque[frozenset[int]] | deque[bool]) -> bool:
        """Whether a window asks for a degradation; a full one that does not may prove the codec."""
        if len(window) < (window.maxlen or 0):
            return False
        if _too_many(sum(map(bool, window)), window):
            return True
        if evidence == self._cause and self._commits >= self.budget.recover_after:
            self._proven = True
        return False

    def _degrade(self, cause: Evidence, drifting: frozenset[int]) -> GuardChange:
        if self.mode == "normal":
            shortest = self.budget.recover_after
            self._wait = shortest if self._proven else min(2 * self._wait, shortest << MAX_DOUBLINGS)
        self._cause = cause
        if self.action == "native":
            return self._change("native", cause, self.native | drifting)
        return self._change("stopped", cause, frozenset())

    def _change(self, mode: GuardMode, cause: Evidence, native: frozenset[int]) -> GuardChange:
        change = GuardChange(mode, cause, self._commits)
        self.mode, self.native, self._commits = mode, native, 0
        for window in (self._compressions, self._checks, self._trials):
            window.clear()
        return change


def _too_many(over: int, window: Sized) -> bool:
    return 2 * over >= len(window)


def _drifting(window: Collection[frozenset[int]]) -> frozenset[int]:
    """The layers most often over budget, as many as it takes to have less than half of a window over it without them."""
    counts = Counter(layer for over in window for layer in over)
    found: set[int] = set()
    for layer, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if not _too_many(sum(bool(over - found) for over in window), window):
            break
        found.add(layer)
    return frozenset(found)
