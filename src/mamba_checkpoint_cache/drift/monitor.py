"""The sampled logit check: what restored states cost in accuracy, measured on live requests and off the critical path."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal, Protocol

import torch
from torch import Tensor

from mamba_checkpoint_cache.drift.logits import LogitComparison, compare_logits

MAX_POSITIONS = 17
"""Logits compared in one check: those after the prompt and after each of sixteen decoded tokens."""
BOUND_SECONDS = 60.0

Recompute = Callable[[Sequence[int], Sequence[int]], Generator[None, None, Tensor]]
"""``recompute(tokens, depths)`` runs ``tokens`` from the start without the cache, yields between slices of work, and returns
the logits ``[len(depths), vocabulary]`` after the first ``depths[i]`` tokens. It should take the steps that the request took:
what then differs is the cache's doing."""


class CheckLog(Protocol):
    """Where the monitor says what went wrong."""

    def check_failed(self, error: Exception) -> None:
        """A check came to nothing because of ``error``."""
        ...


class CheckedCache(Protocol):
    """What the monitor needs of a cache."""

    @property
    def telemetry(self) -> CheckLog:
        """That of the cache."""
        ...

    def record_check(self, result: LogitComparison | Literal["failed", "skipped"]) -> None:
        """Take note of how one check ended."""
        ...


@dataclass(slots=True, eq=False)
class Sample:
    """The logits of one request that was restored, collected as they are computed: ``[vocabulary]`` each, and their depths."""

    depths: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    def add(self, depth: int, logits: Tensor) -> bool:
        """Keep a copy of the logits after ``depth`` tokens, without a host sync. Whether that was the last that is wanted.

        Raises:
            ValueError: if the depth is not beyond the one before, or the sample was complete.
        """
        if len(self.depths) == MAX_POSITIONS or (self.depths and depth <= self.depths[-1]):
            raise ValueError(f"expected at most {MAX_POSITIONS} depths in ascending order, got {depth} after {self.depths}")
        self.depths.append(depth)
        self.logits.append(logits.detach().clone())  # the engine may use the buffer again
        return len(self.depths) == MAX_POSITIONS


class DriftMonitor:
    """Compares the logits of some hits with a recomputation from the start, and tells the cache what came of it.

    An engine of any kind calls it, from the thread that calls the cache: :meth:`sample` at each hit; where that gives a sample,
    ``sample.add`` with the logits it computes anyway; then :meth:`check`, or :meth:`drop` if the request failed; and
    :meth:`step` whenever there is time. A share ``rate`` of the hits is sampled, one at a time and at most ``per_minute``;
    those passed over for that are counted as skipped. ``clock`` gives seconds; ``random`` decides who is sampled. Neither ever
    decides what the cache keeps, unless a guard acts on what was measured.

    Raises:
        ValueError: if ``rate`` is not a share, or ``per_minute`` is under 1.
    """

    def __init__(
        self,
        cache: CheckedCache,
        *,
        rate: float = 0.01,
        per_minute: int = 6,
        clock: Callable[[], float] = time.monotonic,
        random: Random | None = None,
    ) -> None:
        if not 0 <= rate <= 1:
            raise ValueError(f"rate must be a share of the hits, 0 … 1, got {rate}")
        if per_minute < 1:
            raise ValueError(f"per_minute must be at least 1, got {per_minute}: to check nothing, set rate to 0")
        self._cache = cache
        self._rate = rate
        self._clock = clock
        self._random = random or Random(0)  # noqa: S311 - a lot, no secret
        self._begun: deque[float] = deque(maxlen=per_minute)
        self._sample: Sample | None = None
        self._check: Generator[None, None, LogitComparison] | None = None

    @property
    def checking(self) -> bool:
        """Whether a recomputation is under way: :meth:`step` has something to do."""
        return self._check is not None

    def sample(self) -> Sample | None:
        """What to collect a request's logits in, if it is to be checked. For each request that the cache has restored."""
        if self._random.random() >= self._rate:
            return None
        if self._sample is not None or self._check is not None or not self._allowed():
            self._cache.record_check("skipped")
            return None
        self._sample = Sample()
        return self._sample

    def check(self, sample: Sample, tokens: Sequence[int], recompute: Recompute) -> None:
        """Begin to check a sample: its request has ended, or gave all that is wanted. ``tokens``: all up to the last depth.

        Raises:
            ValueError: if it is not the sample being collected, or has no logits.
        """
        self._require(sample)
        if not sample.depths:
            raise ValueError("expected a sample with the logits of at least one depth: drop an empty one")
        self._sample = None
        self._begun.append(self._clock())
        self._check = _comparison(sample, tokens, recompute)

    def drop(self, sample: Sample) -> None:
        """The sampled request failed or was aborted: there is nothing to check.

        Raises:
            ValueError: if it is not the sample being collected.
        """
        self._require(sample)
        self._sample = None
        self._cache.record_check("skipped")

    def step(self) -> None:
        """Run one slice of the check under way, if there is one; after the last, compare and report.

        What a recomputation raises ends that check as failed, and goes no further.
        """
        if self._check is None:
            return
        try:
            next(self._check)
        except StopIteration as done:
            self._end(done.value)
        except Exception as error:  # noqa: BLE001 - a check never reaches the serving path
            self._cache.telemetry.check_failed(error)
            self._end("failed")

    def _end(self, result: LogitComparison | Literal["failed"]) -> None:
        self._check = None
        self._cache.record_check(result)

    def _allowed(self) -> bool:
        return len(self._begun) < (self._begun.maxlen or 0) or self._clock() - self._begun[0] >= BOUND_SECONDS

    def _require(self, sample: Sample) -> None:
        if sample is not self._sample:
            raise ValueError("expected the sample that this monitor gave out last and that is still open, got another one")


def _comparison(sample: Sample, tokens: Sequence[int], recompute: Recompute) -> Generator[None, None, LogitComparison]:
    reference = yield from recompute(tokens, sample.depths)
    return compare_logits(reference, torch.stack(sample.logits))
