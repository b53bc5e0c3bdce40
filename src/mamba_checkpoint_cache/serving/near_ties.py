"""Greedy choices so close that rounding could turn them, decided as if nothing had been cached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from mamba_checkpoint_cache.serving.recompute import Recomputation, drained

if TYPE_CHECKING:
    from mamba_checkpoint_cache.integrations.transformers import HybridModel

MARGIN = 100.0
"""How many times the model's own rounding noise the lead of the likeliest token must exceed to count as safe."""
MAX_NOISE = 1e-4
"""With more rounding noise than this, as in any dtype but float32, too many choices would be close."""


class NearTies:
    """Makes greedy output with exact checkpoints equal to that without a cache, token for token.

    A request that resumes off the chunk grid, at a branch point or where another one ended, runs other steps than it would from
    the start, so its logits differ in their last bits. That matters only where two tokens are all but equally likely: about
    one in a thousand, which is then decided by running the whole sequence from the start.
    """

    def __init__(self, model: HybridModel, chunk: int) -> None:
        self._margin = MARGIN * model.continuation.noise
        self._chunk = chunk
        self._recomputation = Recomputation(model)

    def is_close(self, logits: Tensor) -> bool:
        """Whether rounding could make another token of ``logits`` ``[vocabulary]`` the likeliest."""
        first, second = logits.float().topk(2).values
        return bool(first - second <= self._margin * logits.float().std())

    def logits_from_start(self, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
        """The logits after ``prompt`` and ``output``, in the steps of a run without a cache: chunks, then token by token."""
        sequence = [*prompt, *output]
        ends = [*range(self._chunk, len(prompt), self._chunk), *range(len(prompt), len(sequence) + 1)]
        return drained(self._recomputation.run(sequence, [len(sequence)], ends=ends))[0]
