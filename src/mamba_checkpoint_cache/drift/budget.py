"""The drift budget: how much accuracy compressed checkpoints may cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DriftBudget:
    """What compressed states may cost, and how long over that is too long. The unit of time is the call, never the clock.

    ``relative_error``: ceiling on one compression's Frobenius error relative to the state, in each recurrent layer. ``kl_nats``:
    ceiling on the mean logit KL of one check. ``window`` compressions, and ``checks`` logit checks, are looked back on: too long
    is when at least half of a full window lies over its ceiling. ``recover_after``: the fewest commits after which a codec that
    was taken out of service is tried again.

    Raises:
        ValueError: if a ceiling is not over 0, or one of the counts is under 1.
    """

    relative_error: float = 0.05
    kl_nats: float = 0.1
    window: int = 32
    checks: int = 4
    recover_after: int = 256

    def __post_init__(self) -> None:
        for name, ceiling in self.ceilings.items():
            if not ceiling > 0.0:
                raise ValueError(f"DriftBudget.{name} must be over 0, got {ceiling}")
        for name in ("window", "checks", "recover_after"):
            if getattr(self, name) < 1:
                raise ValueError(f"DriftBudget.{name} must be at least 1, got {getattr(self, name)}")

    @property
    def ceilings(self) -> dict[str, float]:
        """The two ceilings by name."""
        return {"relative_error": self.relative_error, "kl_nats": self.kl_nats}

    def holds_error(self, relative_error: float) -> bool:
        """Whether a compression's error in a layer is within the budget; NaN is not."""
        return relative_error <= self.relative_error

    def holds_kl(self, mean_kl_nats: float) -> bool:
        """Whether a check's mean logit KL is within the budget; NaN is not."""
        return mean_kl_nats <= self.kl_nats
