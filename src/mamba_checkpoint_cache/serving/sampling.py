"""How the next token is chosen, and when a request ends."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

MAX_SEED = 2**63 - 1
GREEDY_BELOW = 1e-6
"""Temperatures under this one are taken as 0."""


class NonFiniteLogitsError(RuntimeError):
    """The model gave logits that are NaN or infinite: there is no next token."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """``temperature`` 0 takes the likeliest token; otherwise ``top_p`` cuts the tail and ``seed`` makes it repeatable.

    The request ends after ``max_new_tokens``, or with the first token of ``stop_ids`` or text of ``stop_texts``; with
    ``ignore_eos`` the model's own end tokens are not among those.

    Raises:
        ValueError: if a number is out of range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop_ids: frozenset[int] = field(default=frozenset())
    stop_texts: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be 0 or more, got {self.max_new_tokens}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be a finite number, 0 or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed must lie in 0 … {MAX_SEED}, got {self.seed}")


GREEDY = Sampling()


class Sampler:
    """Chooses the tokens of one request; the draws of a seeded one depend on nothing but the seed and the logits."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator: torch.Generator | None = None
        if sampling.temperature >= GREEDY_BELOW:
            self._generator = torch.Generator()
            if sampling.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(sampling.seed)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken each time."""
        return self._generator is None

    def choose(self, logits: Tensor) -> int:
        """The next token for ``logits`` ``[vocabulary]``; among equals, greedily, the smallest id.

        Raises:
            NonFiniteLogitsError: if a logit is NaN or infinite.
        """
        logits = finite(logits)
        if self._generator is None:
            return int(logits.argmax())
        probabilities = torch.softmax((logits - logits.max()) / self._sampling.temperature, dim=-1)
        ordered, ids = probabilities.sort(descending=True, stable=True)
        ordered[ordered.cumsum(0) - ordered >= self._sampling.top_p] = 0
        return int(ids[torch.multinomial(ordered, 1, generator=self._generator)])


def finite(logits: Tensor) -> Tensor:
    """``logits`` in float32 on the host.

    Raises:
        NonFiniteLogitsError: if one is NaN or infinite.
    """
    logits = logits.float().cpu()
    if not torch.isfinite(logits).all():
        raise NonFiniteLogitsError("the model's logits are not finite")
    return logits
