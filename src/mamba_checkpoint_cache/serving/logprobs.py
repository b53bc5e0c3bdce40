"""Log-probabilities of tokens, for the requests that ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mamba_checkpoint_cache.serving.sampling import finite


@dataclass(frozen=True, slots=True)
class WantedLogprobs:
    """What a request wants to know beside its output: the log-probability of each output token.

    ``top``: so many of the likeliest tokens at each position as well. ``prompt_from``: also for the prompt's tokens from this
    one on, as far as they were computed and not reused; None for none of them.

    Raises:
        ValueError: if a number is negative.
    """

    top: int = 0
    prompt_from: int | None = None

    def __post_init__(self) -> None:
        if self.top < 0 or (self.prompt_from is not None and self.prompt_from < 0):
            raise ValueError(f"top and prompt_from must be 0 or more, got {self.top} and {self.prompt_from}")

    def check(self, num_tokens: int, vocab_size: int) -> None:
        """Raise :class:`ValueError` unless a prompt of ``num_tokens`` has such tokens, and the vocabulary so many."""
        if self.prompt_from is not None and self.prompt_from >= num_tokens:
            raise ValueError(f"log-probabilities are wanted from token {self.prompt_from} of a prompt of {num_tokens}")
        if self.top > vocab_size:
            raise ValueError(f"the {self.top} likeliest tokens are wanted, of a vocabulary of {vocab_size}")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token, its log-probability, and the likeliest tokens there with theirs; None where nothing was computed."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[float, int], ...] | None = None


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """What ``logits`` ``[positions, vocabulary]`` say of the tokens that follow: natural logs of their softmax, in float64.

    Temperature and top-p play no part.

    Raises:
        NonFiniteLogitsError: if a logit is NaN or infinite.
    """
    logprobs = finite(logits).double().log_softmax(-1)
    likeliest, ids = logprobs.topk(min(top, logprobs.shape[-1]), dim=-1)
    rows = zip(tokens, logprobs, likeliest.tolist(), ids.tolist(), strict=True)
    return [TokenLogprob(token, float(row[token]), tuple(zip(values, of, strict=True))) for token, row, values, of in rows]
