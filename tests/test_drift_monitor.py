"""The monitor of the sampled logit check, with an engine and a cache that do as they are told."""

from __future__ import annotations

from random import Random

import pytest
import torch
from telemetry_fakes import Clock

from mamba_checkpoint_cache.drift.logits import LogitComparison
from mamba_checkpoint_cache.drift.monitor import MAX_POSITIONS, DriftMonitor, Sample


class Results(list):
    """A cache that only remembers how checks ended, and is its own telemetry."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.telemetry = self

    def record_check(self, result) -> None:
        self.append(result)

    def check_failed(self, error: Exception) -> None:
        self.errors.append(error)


def monitor_of(results: Results, **options) -> DriftMonitor:
    return DriftMonitor(results, **({"rate": 1.0, "per_minute": 1000, "clock": Clock()} | options))


def recomputation(logits: torch.Tensor, slices: int = 3, fail_at: int | None = None):
    """A recompute callback that takes so many slices to come to ``logits``."""

    def recompute(tokens, depths):
        for number in range(slices):
            if number == fail_at:
                raise ArithmeticError("the recomputation failed")
            yield
        return logits[: len(depths)]

    return recompute


def begin(monitor: DriftMonitor, logits: torch.Tensor, recompute=None) -> None:
    """Sample a request that gives these logits, and begin to check it."""
    sample = monitor.sample()
    assert sample is not None
    for position, row in enumerate(logits):
        sample.add(10 + position, row)
    monitor.check(sample, range(10 + len(logits)), recompute or recomputation(logits))


def run(monitor: DriftMonitor) -> int:
    """Steps until the check is over."""
    steps = 0
    while monitor.checking:
        monitor.step()
        steps += 1
    return steps


def logits_of(positions: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randn(positions, 11, generator=torch.Generator().manual_seed(seed))


def test_equal_logits_give_exactly_zero() -> None:
    """A recomputation that gives the same logits is reported once, as no distance at any position."""
    results = Results()
    monitor = monitor_of(results)

    begin(monitor, logits_of())

    assert (run(monitor), results) == (4, [LogitComparison((0.0,) * 4, (True,) * 4)])


def test_the_recomputation_is_the_reference() -> None:
    """The distance is KL(recomputed || restored), position by position."""
    results, restored, reference = Results(), logits_of(3, seed=1), logits_of(3, seed=2)
    monitor = monitor_of(results)

    begin(monitor, restored, recomputation(reference))
    run(monitor)

    p, q = reference.double().softmax(-1), restored.double().softmax(-1)
    assert results[0].kl_nats == pytest.approx((p * (p / q).log()).sum(-1).tolist())
    assert results[0].agreed == tuple((reference.argmax(-1) == restored.argmax(-1)).tolist())


def test_recompute_gets_the_tokens_and_the_depths() -> None:
    """What the engine handed over comes back to its callback as it was."""
    seen = []

    def recompute(tokens, depths):
        seen.append((list(tokens), list(depths)))
        return logits_of(2)
        yield

    monitor = monitor_of(Results())
    begin(monitor, logits_of(2), recompute)
    run(monitor)

    assert seen == [(list(range(12)), [10, 11])]


def test_the_engine_may_use_its_buffer_again() -> None:
    """Logits that are overwritten after they were added are checked as they were."""
    results, buffer = Results(), torch.zeros(11)
    monitor = monitor_of(results)
    sample = monitor.sample()
    rows = logits_of(3)
    for depth, row in enumerate(rows):
        buffer.copy_(row)
        sample.add(depth + 1, buffer)
    monitor.check(sample, range(3), recomputation(rows))

    run(monitor)

    assert results[0].kl_nats == (0.0,) * 3


def test_one_slice_a_step() -> None:
    """Each step runs one slice of the recomputation, and none once it is over."""
    ran = []

    def recompute(tokens, depths):
        for number in range(5):
            ran.append(number)
            yield
        return logits_of()

    monitor = monitor_of(Results())
    monitor.step()
    begin(monitor, logits_of(), recompute)

    seen = []
    for _ in range(7):
        monitor.step()
        seen.append((len(ran), monitor.checking))

    assert seen == [(1, True), (2, True), (3, True), (4, True), (5, True), (5, False), (5, False)]


@pytest.mark.parametrize("fail_at", [0, 2])
def test_a_recomputation_that_raises_is_a_failed_check(fail_at: int) -> None:
    """What it raises goes no further, counts once, and the next check can begin."""
    results = Results()
    monitor = monitor_of(results)

    begin(monitor, logits_of(), recomputation(logits_of(), fail_at=fail_at))
    run(monitor)
    begin(monitor, logits_of())
    run(monitor)

    assert results == ["failed", LogitComparison((0.0,) * 4, (True,) * 4)]
    assert [str(error) for error in results.errors] == ["the recomputation failed"]


def test_logits_that_do_not_fit_are_a_failed_check() -> None:
    """A recomputation of another vocabulary can't be compared, and does no harm."""
    results = Results()
    monitor = monitor_of(results)

    begin(monitor, logits_of(), recomputation(torch.zeros(4, 12)))
    run(monitor)

    assert results == ["failed"]


def test_never_two_at_once() -> None:
    """While one is collected or recomputed, a hit that would have been sampled is counted as skipped."""
    results = Results()
    monitor = monitor_of(results)
    sample = monitor.sample()

    assert monitor.sample() is None
    sample.add(1, torch.zeros(11))
    monitor.check(sample, [1], recomputation(torch.zeros(1, 11)))
    assert monitor.sample() is None
    run(monitor)

    assert results[:2] == ["skipped", "skipped"]
    assert isinstance(results[2], LogitComparison)
    assert isinstance(monitor.sample(), Sample)


def test_so_many_a_minute() -> None:
    """In any sixty seconds no more than ``per_minute`` checks begin, however many hits there are; the rest are skipped."""
    results, clock = Results(), Clock()
    monitor = monitor_of(results, per_minute=3, clock=clock)
    begun: list[float] = []
    for _ in range(1000):
        if (sample := monitor.sample()) is not None:
            sample.add(1, torch.zeros(11))
            monitor.check(sample, [1], recomputation(torch.zeros(1, 11)))
            begun.append(clock.now)
        run(monitor)
        clock.tick(0.5)

    assert all(later - earlier >= 60 for earlier, later in zip(begun, begun[3:], strict=False))
    assert len(begun) == 3 * 9  # 500 seconds: eight whole minutes and one begun
    assert results.count("skipped") == 1000 - len(begun)


def test_a_dropped_sample_is_skipped_and_not_counted_against_the_minute() -> None:
    """A request that failed gives way to the next."""
    results = Results()
    monitor = monitor_of(results, per_minute=1)
    for _ in range(3):
        monitor.drop(monitor.sample())

    begin(monitor, logits_of())

    assert (results, monitor.checking) == (["skipped"] * 3, True)


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.3, 1.0])
def test_the_rate_is_the_share_that_is_drawn(rate: float) -> None:
    """Of many hits the share ``rate`` is sampled or skipped, the same ones each time; with 0 none, with 1 all."""
    drawn = []
    for _ in range(2):
        results = Results()
        monitor = monitor_of(results, rate=rate, random=Random(5))
        drawn.append([monitor.sample() is not None or len(results) for _ in range(20_000)])
        total = len(results) + (rate > 0)

    assert drawn[0] == drawn[1]
    assert total == pytest.approx(20_000 * rate, abs=3 * (20_000 * rate * (1 - rate)) ** 0.5)


def test_a_sample_is_full_after_the_prompt_and_sixteen_tokens() -> None:
    """``add`` says when it has all that is wanted, and refuses more, or a depth that does not follow."""
    sample = Sample()

    said = [sample.add(depth, torch.zeros(3)) for depth in range(5, 5 + MAX_POSITIONS)]

    assert said == [False] * 16 + [True]
    with pytest.raises(ValueError, match="at most 17 depths in ascending order, got 22"):
        sample.add(22, torch.zeros(3))
    with pytest.raises(ValueError, match="got 7 after"):
        Sample([7], [torch.zeros(3)]).add(7, torch.zeros(3))


def test_misuse_is_refused() -> None:
    """A sample that is not the open one, or is empty, and numbers out of range."""
    monitor = monitor_of(Results())
    sample = monitor.sample()

    with pytest.raises(ValueError, match="at least one depth"):
        monitor.check(sample, [1], recomputation(logits_of()))
    for call in (lambda: monitor.drop(Sample()), lambda: monitor.check(Sample([1], [torch.zeros(3)]), [1], None)):
        with pytest.raises(ValueError, match="got another one"):
            call()
    for options in ({"rate": -0.1}, {"rate": 1.1}, {"rate": float("nan")}):
        with pytest.raises(ValueError, match="rate must be a share"):
            monitor_of(Results(), **options)
    with pytest.raises(ValueError, match="per_minute must be at least 1, got 0"):
        monitor_of(Results(), per_minute=0)
