"""Telemetry that fails in every way it can, and a cache and an engine that do exactly what they would do without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from unittest.mock import patch

import opentelemetry.context
import pytest
from cache_play import TURNS, Turn, build, play
from hash_model import expected, greedy, hash_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import trace
from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily
from telemetry_fakes import value

from mamba_checkpoint_cache import DriftBudget, DriftGuard, Telemetry
from mamba_checkpoint_cache.telemetry import recorder
from mamba_checkpoint_cache.telemetry.instruments import Counter, Histogram
from mamba_checkpoint_cache.telemetry.logs import Logs

SECRET = "/secret/path of request-4711"


class Flaky:
    """Raises, all the time or now and then."""

    def __init__(self, odds: float) -> None:
        self.odds, self.random, self.raised = odds, Random(7), 0

    def fail(self, *_arguments: object, **_options: object) -> None:
        if self.random.random() < self.odds:
            self.raised += 1
            raise RuntimeError(SECRET)

    def before(self, function: Callable) -> Callable:
        """The function, when it doesn't raise."""

        def call(*arguments: object, **options: object) -> object:
            self.fail()
            return function(*arguments, **options)

        return call


class FlakySpan(trace.NonRecordingSpan):
    """A sampled, recording span whose every method may raise."""

    def __init__(self, flaky: Flaky) -> None:
        super().__init__(trace.SpanContext(1, 2, is_remote=False, trace_flags=trace.TraceFlags(1)))
        for name in ("get_span_context", "set_attributes", "add_event", "add_link", "record_exception", "set_status", "end"):
            setattr(self, name, flaky.before(getattr(super(), name)))
        self.is_recording = flaky.before(lambda: True)


class FlakyTracer(trace.NoOpTracer):
    def __init__(self, flaky: Flaky) -> None:
        self.flaky = flaky

    def start_span(self, *_arguments: object, **_options: object) -> FlakySpan:
        self.flaky.fail()
        return FlakySpan(self.flaky)


class FlakyProvider(trace.TracerProvider):
    def __init__(self, flaky: Flaky) -> None:
        self.flaky = flaky

    def get_tracer(self, *_arguments: object, **_options: object) -> FlakyTracer:
        return FlakyTracer(self.flaky)


class FlakyLogger:
    def __init__(self, flaky: Flaky) -> None:
        self.bind = lambda **_fields: self
        self.warning = self.error = self.debug = flaky.fail


PARTS = ("counters", "histograms", "tracer", "logger", "clock", "snapshot")


@contextmanager
def broken(parts: set[str], flaky: Flaky) -> Iterator[Telemetry]:
    """Telemetry of which some parts are flaky; the counter of failures alone always works."""
    steady = iter(range(10**9))
    telemetry = Telemetry(
        tracer_provider=FlakyProvider(flaky) if "tracer" in parts else None,
        logger=FlakyLogger(flaky) if "logger" in parts else None,
        clock=flaky.before(lambda: float(next(steady))) if "clock" in parts else lambda: float(next(steady)),
    )
    errors, increment = telemetry._metrics.errors, Counter.inc

    def inc(counter: Counter, *arguments: float) -> None:
        if counter is not errors:
            flaky.fail()
        increment(counter, *arguments)

    with ExitStack() as patches:
        if "counters" in parts:
            patches.enter_context(patch.object(Counter, "inc", inc))
        if "histograms" in parts:
            patches.enter_context(patch.object(Histogram, "settle", flaky.before(Histogram.settle)))
        if "snapshot" in parts:
            patches.enter_context(patch.object(GaugeMetricFamily, "add_metric", flaky.before(GaugeMetricFamily.add_metric)))
        yield telemetry
        telemetry.close()


@settings(max_examples=60)
@given(parts=st.sets(st.sampled_from(PARTS), min_size=1), odds=st.sampled_from([1.0, 0.5, 0.1]), turns=TURNS)
def test_whatever_raises_the_cache_does_the_same(parts: set[str], odds: float, turns: list[Turn]) -> None:
    """Metrics, spans, logs, clock and snapshots raise: every result and every byte is as without telemetry; it is counted."""
    guards = [DriftGuard(DriftBudget(window=2, checks=1, recover_after=2)) for _ in range(2)]
    quiet = play(build(None, guards[0]), turns)
    context = opentelemetry.context.get_current()

    flaky = Flaky(odds)
    with broken(parts, flaky) as telemetry:
        heard = play(build(telemetry, guards[1]), turns)
        exposition = generate_latest(telemetry.registry).decode()
        errors = value(telemetry.registry, "telemetry_errors_total") or 0

    assert heard == quiet
    assert (errors > 0) == (flaky.raised > 0)
    assert SECRET not in exposition
    assert opentelemetry.context.get_current() == context


def test_every_metric_raising_moves_the_error_counter_alone() -> None:
    """With every counter and histogram raising all the time, what is exposed is failures, and zeros."""
    turns = [Turn((1, 2, 3), (2,), poisoned=False, end="finish", after="nothing")]

    with broken({"counters", "histograms"}, Flaky(1.0)) as telemetry:
        play(build(telemetry), turns)
        samples = [s for family in telemetry.registry.collect() if family.type != "gauge" for s in family.samples]

    assert {sample.name for sample in samples if sample.value} == {"mamba_checkpoint_telemetry_errors_total"}


@pytest.mark.parametrize("parts", [{part} for part in PARTS] + [set(PARTS)], ids=lambda parts: "+".join(sorted(parts)))
def test_whatever_raises_the_engine_serves_the_same(parts: set[str]) -> None:
    """Under broken telemetry an engine gives every request the output that its model defines."""
    prompts = [list(f"prompt {i % 4}, and what comes after it {i}".encode()) for i in range(12)]

    with broken(parts, Flaky(1.0)) as telemetry:
        requests = hash_engine(telemetry=telemetry).generate(prompts, greedy(6))

    assert [request.output for request in requests] == [expected(prompt, 6) for prompt in prompts]
    assert any(request.cached_tokens for request in requests)


def test_no_telemetry_means_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache without telemetry reads no clock, makes no span, metric, birth note or line, and makes no operation objects."""

    def fail(*_arguments: object, **_options: object) -> None:
        pytest.fail("telemetry was touched")

    for owner, name in (
        (recorder.Operation, "_start_span"),
        (recorder.Metrics, "__init__"),
        (recorder.Tracing, "__init__"),
        (Logs, "__init__"),
        (Counter, "__init__"),
        (Counter, "inc"),
        (Histogram, "observe"),
        (Histogram, "settle"),
        (opentelemetry.context, "attach"),
        (recorder.time, "perf_counter"),
    ):
        monkeypatch.setattr(owner, name, fail)

    cache = build(None)
    play(cache, [Turn((1, 2, 3, 4), (2, 4), poisoned=False, end="finish", after="flush")] * 3)

    assert cache.telemetry is recorder.NULL
    assert recorder.NULL.operation("match") is recorder.NULL.operation("commit")
