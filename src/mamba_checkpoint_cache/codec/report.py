"""What a codec reported on one compression, read once it has arrived."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mamba_checkpoint_cache.codec.base import ERROR_ENERGY, NON_FINITE, SIGNAL_ENERGY


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a compression's report says: relative errors of the whole state, of its worst head, and of each recurrent layer."""

    finite: bool
    relative_error: float
    worst_head: float
    layer_errors: tuple[float, ...]


class Report:
    """A codec's report on one compression, which may still be on its way from the device."""

    def __init__(self, energies: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._energies = energies
        if energies.is_cuda:
            self._energies = torch.empty(energies.shape, dtype=energies.dtype, pin_memory=True)
            self._energies.copy_(energies, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def deferred(self) -> bool:
        """Whether reading the verdict may have to wait for the device."""
        return self._event is not None

    def verdict(self) -> Verdict:
        """Read the report; waits for the one event behind it."""
        if self._event is not None:
            self._event.synchronize()
        layers = self._energies.sum((0, -2)).tolist()
        totals = [sum(column) for column in zip(*layers, strict=True)]
        heads = self._energies[..., ERROR_ENERGY] / self._energies[..., SIGNAL_ENERGY]
        return Verdict(
            finite=totals[NON_FINITE] == 0,
            relative_error=_relative(totals),
            worst_head=math.sqrt(float(heads.nan_to_num_(0.0).max())),  # 0/0: a head of zeros has no error
            layer_errors=tuple(map(_relative, layers)),
        )


def _relative(energies: Sequence[float]) -> float:
    """Norm of the error over norm of the signal; infinite for an error in what was all zeros."""
    signal, error = energies[SIGNAL_ENERGY], energies[ERROR_ENERGY]
    if not error:
        return 0.0
    return math.sqrt(error / signal) if signal else math.inf
