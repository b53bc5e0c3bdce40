"""The drift guard: when compressed states are over their budget for too long, and when they may be tried again."""

from __future__ import annotations

from collections import deque
from typing import Literal, NamedTuple, get_args

from mamba_checkpoint_cache.drift.budget import DriftBudget
from mamba_checkpoint_cache.telemetry.catalogue import GuardMode

GuardAction = Literal["native", "stop"]
Evidence = Literal["compressions", "checks", "trials"]

MAX_DOUBLINGS = 6
"""How often the wait for a recovery doubles at most: sixty-four times as long, by default 16,384 commits."""


class GuardChange(NamedTuple):
    """A new mode, what brought it about, and the commits since the change before."""

    to: GuardMode
    cause: Evidence
    commits: int


class DriftGuard:
    """Takes a lossy codec out of service while it is over ``budget``, and puts it back with hysteresis, like a circuit breaker.

    ``mode`` is ``normal``; ``native``, where states are kept in their native dtype; or ``stopped``, where none are kept.
    ``action`` says which of the two a degradation leads to. A cache whose pool could not hold one native state, or holds native
    states already, sets it to ``stop``.

    From normal: as soon as at least half of a full window of compressions, or of logit checks, is over budget. Back to normal:
    once ``recover_after`` commits have passed and a full window of trials was within budget without exception. A trial runs the
    codec on a state that is being committed, and throws away what comes of it. Trials don't see drift that only logits show: the
    codec is then simply tried again. Until it has proved itself, by ``recover_after`` commits and a full window within budget of
    what it failed on, another degradation doubles the wait, up to sixty-four times.

    A pure function of the calls made on it: ranks that make the same calls change together. One guard serves one cache, which
    makes all of them; an engine only reads ``mode``.

    Raises:
        ValueError: if ``action`` is unknown.
    """

    def __init__(self, budget: DriftBudget | None = None, action: GuardAction = "native") -> None:
        if action not in get_args(GuardAction):
            raise ValueError(f"expected a guard's action out of {get_args(GuardAction)}, got {action!r}")
        self.budget = budget or DriftBudget()
        self.action = action
        self.mode: GuardMode = "normal"
        self._over: dict[Evidence, deque[bool]] = {
            "compressions": deque(maxlen=self.budget.window),
            "checks": deque(maxlen=self.budget.checks),
            "trials": deque(maxlen=self.budget.window),
        }
        self._cause: Evidence = "compressions"
        self._commits = 0
        self._wait = self.budget.recover_after
        self._proven = True

    @property
    def trial_due(self) -> bool:
        """Whether the state that is being committed should also be given to the codec as a trial.

        So often that a full window of trials, each read at the next one, has come in when the shortest wait ends.
        """
        every = max(1, (self.budget.recover_after - 1) // (self.budget.window + 1))
        return self.mode != "normal" and self._commits % every == 0

    def compression(self, within: bool) -> GuardChange | None:
        """The verdict on one compression by the codec. Ignored in other modes than normal."""
        return self._judge("compressions", within)

    def check(self, within: bool) -> GuardChange | None:
        """The verdict on one logit check. Ignored in other modes than normal: it is not compressed states that it tells of."""
        return self._judge("checks", within)

    def trial(self, within: bool) -> None:
        """The verdict on one trial."""
        self._over["trials"].append(not within)

    def commit(self) -> GuardChange | None:
        """A commit offers a state."""
        self._commits += 1
        trials = self._over["trials"]
        waited = self.mode != "normal" and self._commits >= self._wait
        if waited and len(trials) == trials.maxlen and not any(trials):
            self._proven = False
            return self._change("normal", "trials")
        return None

    def _judge(self, evidence: Evidence, within: bool) -> GuardChange | None:
        if self.mode != "normal":
            return None
        over = self._over[evidence]
        over.append(not within)
        if len(over) < (over.maxlen or 0):
            return None
        if 2 * sum(over) >= len(over):
            return self._degrade(evidence)
        if evidence == self._cause and self._commits >= self.budget.recover_after:
            self._proven = True
        return None

    def _degrade(self, cause: Evidence) -> GuardChange:
        shortest = self.budget.recover_after
        self._wait = shortest if self._proven else min(2 * self._wait, shortest << MAX_DOUBLINGS)
        self._cause = cause
        return self._change("native" if self.action == "native" else "stopped", cause)

    def _change(self, mode: GuardMode, cause: Evidence) -> GuardChange:
        change = GuardChange(mode, cause, self._commits)
        self.mode, self._commits = mode, 0
        for over in self._over.values():
            over.clear()
        return change
