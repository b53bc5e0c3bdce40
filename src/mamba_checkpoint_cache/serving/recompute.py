"""Running a sequence from its start without the cache, a step at a time, in the steps that a request took."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from mamba_checkpoint_cache.slots import ActiveSlot

if TYPE_CHECKING:
    from mamba_checkpoint_cache.integrations.transformers import HybridModel


class Recomputation:
    """A row of its own to run sequences in, one at a time, beside all that is served and cached.

    Holds one state; the keys and values of the sequence live with its run.
    """

    def __init__(self, model: HybridModel) -> None:
        self._model = model
        self._pool = model.active_pool(1)
        self._slot = cast(ActiveSlot, self._pool.allocate())
        self._kv = model.kv_store(0)

    def run(self, tokens: Sequence[int], depths: Sequence[int], *, ends: Sequence[int]) -> Generator[None, None, Tensor]:
        """Run ``tokens`` in steps that end at ``ends``, yielding between them.

        Returns the logits ``[len(depths), vocabulary]`` after ``depths`` tokens each, ascending and all of them among ``ends``.
        """
        self._pool.zero(self._slot)
        session = self._model.start(self._pool, self._slot.index, kv=self._kv)
        wanted, found = frozenset(depths), []
        for end in ends:
            begin = session.depth
            padding = [0] * (end - begin)  # nobody reads this KV from the store
            logits = session.run(tokens[begin:end], padding)
            if end in wanted:
                found.append(logits.clone())
            if end != ends[-1]:
                logits[0].item()  # wait for the device, so that what a slice takes can be measured
                yield
        return torch.stack(found)


def drained(slices: Generator[None, None, Tensor]) -> Tensor:
    """The result of a run, all of whose slices are run now."""
    while True:
        try:
            next(slices)
        except StopIteration as done:
            return cast(Tensor, done.value)
