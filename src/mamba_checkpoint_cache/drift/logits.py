"""How far two runs of a model over the same tokens lie apart, judged by their logits."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LogitComparison:
    """Logits of a restored run against those of a reference, position by position.

    ``kl_nats``: KL(reference || restored) of the next-token distributions, at least 0. ``agreed``: whether both runs find the
    same token likeliest.
    """

    kl_nats: tuple[float, ...]
    agreed: tuple[bool, ...]

    @property
    def mean_kl_nats(self) -> float:
        """The mean over the positions; NaN if the logits of either run were not finite."""
        return sum(self.kl_nats) / len(self.kl_nats)


def compare_logits(reference: Tensor, restored: Tensor) -> LogitComparison:
    """Compare ``[positions, vocabulary]`` logits; copies them to the host.

    Raises:
        ValueError: if the shapes differ, or there is no position to compare.
    """
    if reference.shape != restored.shape or reference.ndim != 2 or not len(reference):
        shapes = f"{list(reference.shape)} and {list(restored.shape)}"
        raise ValueError(f"expected two tensors [positions, vocabulary] of at least one position, got {shapes}")
    same = (reference.argmax(-1) == restored.argmax(-1)).tolist()
    return LogitComparison(tuple(kl_nats(reference, restored).tolist()), tuple(same))


def kl_nats(reference: Tensor, restored: Tensor) -> Tensor:
    """KL(reference || restored) in nats between softmaxes over the last axis, in float64.

    Exactly 0 for equal logits; NaN where a logit is NaN or +Inf. Rounding can't make it negative.
    """
    expected = reference.double().log_softmax(-1)
    found = restored.double().log_softmax(-1)
    terms = expected.exp() * (expected - found)
    return terms.where(expected.exp() > 0, 0.0 * expected.exp()).sum(-1).clamp(min=0.0)
