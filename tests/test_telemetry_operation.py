"""One operation: a time in the histogram, a span while something records, and the body's business left alone."""

from __future__ import annotations

from contextvars import copy_context

import pytest
import structlog
import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Decision, Sampler, SamplingResult
from opentelemetry.trace import INVALID_SPAN
from prometheus_client.openmetrics.exposition import generate_latest
from structlog.testing import LogCapture
from telemetry_fakes import Clock, value

from mamba_checkpoint_cache.telemetry import Telemetry
from mamba_checkpoint_cache.telemetry.catalogue import OPERATIONS


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make(clock: Clock, sampler: Sampler = ALWAYS_ON) -> tuple[Telemetry, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=sampler)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Telemetry(tracer_provider=provider, clock=clock), exporter


def errors(telemetry: Telemetry) -> float | None:
    return value(telemetry.registry, "telemetry_errors_total")


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_is_timed(clock: Clock, name: str) -> None:
    """The time between entering and leaving goes into the histogram of that operation, with and without spans."""
    for telemetry in (Telemetry(clock=clock), make(clock)[0], make(clock, ALWAYS_OFF)[0]):
        with telemetry.operation(name) as operation:  # type: ignore[arg-type]
            clock.tick(0.02)
            operation.set(depth=1)

        assert value(telemetry.registry, "operation_seconds_sum", operation=name) == pytest.approx(0.02)
        assert value(telemetry.registry, "operation_seconds_bucket", operation=name, le="0.01") == 0
        assert value(telemetry.registry, "operation_seconds_bucket", operation=name, le="0.025") == 1
        assert errors(telemetry) == 0


def test_operations_inside_nest(clock: Clock) -> None:
    """A commit holds alloc, which holds evict; what follows is a child of the commit again; the engine's request is the root."""
    telemetry, exporter = make(clock)
    with TracerProvider().get_tracer("engine").start_as_current_span("request") as request, telemetry.operation("commit"):
        with telemetry.operation("alloc"), telemetry.operation("evict"):
            pass
        with telemetry.operation("compress"):
            pass

    spans = {span.name.removeprefix("mamba_checkpoint."): span for span in exporter.get_finished_spans()}
    assert list(spans) == ["evict", "alloc", "compress", "commit"]
    assert spans["evict"].parent == spans["alloc"].context
    assert spans["alloc"].parent == spans["compress"].parent == spans["commit"].context
    assert spans["commit"].parent == request.get_span_context()
    assert trace.get_current_span() is INVALID_SPAN


@pytest.mark.parametrize("sampler", [None, ALWAYS_OFF, ALWAYS_ON], ids=["no SDK", "unsampled", "recorded"])
@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt()], ids=["exception", "interrupt"])
def test_what_the_body_raises_passes_through(clock: Clock, sampler: Sampler | None, error: BaseException) -> None:
    """The very same exception arrives at the caller; the time is still recorded, and it is no failure of telemetry."""
    telemetry, exporter = (Telemetry(clock=clock), None) if sampler is None else make(clock, sampler)

    def fail() -> None:
        with telemetry.operation("commit"), telemetry.operation("compress"):
            clock.tick(1)
            raise error

    with pytest.raises(type(error)) as caught:
        fail()

    assert caught.value is error
    assert value(telemetry.registry, "operation_seconds_sum", operation="commit") == 1
    assert errors(telemetry) == 0
    assert trace.get_current_span() is INVALID_SPAN
    if sampler is ALWAYS_ON and exporter is not None:
        noted = [span.status.description for span in exporter.get_finished_spans()]
        assert noted == (["ValueError: bad"] * 2 if isinstance(error, ValueError) else [None] * 2)


def test_attributes_reach_the_span(clock: Clock) -> None:
    """What was set is on the span; a later value replaces an earlier one."""
    telemetry, exporter = make(clock)
    with telemetry.operation("match") as operation:
        operation.set(depth=1, outcome="miss")
        operation.set(depth=2)

    attributes = exporter.get_finished_spans()[0].attributes
    assert attributes == {"mamba_checkpoint.cache": "default", "mamba_checkpoint.depth": 2, "mamba_checkpoint.outcome": "miss"}


def test_a_tensor_attribute_is_dropped_and_counted(clock: Clock) -> None:
    """A tensor never gets onto a span (fault 34): it is dropped and counted, and the rest arrives."""
    telemetry, exporter = make(clock)
    with telemetry.operation("match") as operation:
        operation.set(state=torch.zeros(4), depth=2)

    assert dict(exporter.get_finished_spans()[0].attributes or {}).get("mamba_checkpoint.depth") == 2
    assert "mamba_checkpoint.state" not in dict(exporter.get_finished_spans()[0].attributes or {})
    assert errors(telemetry) == 1


def raise_within(telemetry: Telemetry) -> None:
    with telemetry.operation("match") as operation:
        operation.set(depth=1)
        raise KeyError("the body's")


class Untouchable:
    """Fails on whatever is done with it."""

    def __getattribute__(self, name: str) -> object:
        raise AssertionError("looked at")


@pytest.mark.parametrize("sampler", [None, ALWAYS_OFF], ids=["no SDK", "unsampled"])
def test_attributes_are_not_looked_at_when_nothing_records(clock: Clock, sampler: Sampler | None) -> None:
    """With no span recording and no debug log, a value that was set is never touched."""
    telemetry = Telemetry(clock=clock) if sampler is None else make(clock, sampler)[0]
    with telemetry.operation("match") as operation:
        operation.set(depth=Untouchable())

    assert errors(telemetry) == 0


class CountingSampler(Sampler):
    """Drops everything, and counts how often it was asked."""

    asked = 0

    def should_sample(self, *args: object, **kwargs: object) -> SamplingResult:
        self.asked += 1
        return SamplingResult(Decision.DROP)

    def get_description(self) -> str:
        return "counting"


def test_inside_an_unsampled_operation_no_span_is_started(clock: Clock) -> None:
    """The price of an unsampled commit is one sampling decision, not one per step of it; each step is timed all the same."""
    sampler = CountingSampler()
    telemetry, _ = make(clock, sampler)
    for _ in range(2):
        with telemetry.operation("commit"), telemetry.operation("alloc"), telemetry.operation("evict"):
            pass

    assert sampler.asked == 2
    assert value(telemetry.registry, "operation_seconds_count", operation="evict") == 2


@pytest.mark.parametrize("sampler", [ALWAYS_ON, ALWAYS_OFF, None], ids=["sampled", "unsampled", "no SDK"])
def test_exemplars_only_when_sampled(clock: Clock, sampler: Sampler | None) -> None:
    """Every histogram fed inside a sampled operation points to its trace; otherwise there is no exemplar at all."""
    telemetry = Telemetry(clock=clock) if sampler is None else make(clock, sampler)[0]
    with telemetry.operation("commit"):
        trace_id = f"{trace.get_current_span().get_span_context().trace_id:032x}"
        telemetry.report(0.005, 0.01)
        telemetry.restored("restored", 2)
        telemetry.evicted("forced", True, telemetry.born())
    telemetry.report(0.005, 0.02)  # outside of any operation

    exemplars = [line for line in generate_latest(telemetry.registry).decode().splitlines() if " # {" in line]
    if sampler is ALWAYS_ON:
        assert [line.split("_bucket")[0].removeprefix("mamba_checkpoint_") for line in exemplars] == [
            "operation_seconds",
            "relative_error",
            "relative_error",
            "hops",
            "residency_seconds",
        ]
        assert all(f'# {{trace_id="{trace_id}"}}' in line for line in exemplars)
    else:
        assert exemplars == []


def test_recorded_but_unsampled_gives_no_exemplar(clock: Clock) -> None:
    """A span that records without being sampled reaches no trace store, so nothing points to it."""

    class RecordOnly(CountingSampler):
        def should_sample(self, *args: object, **kwargs: object) -> SamplingResult:
            return SamplingResult(Decision.RECORD_ONLY)

    telemetry, _ = make(clock, RecordOnly())
    with telemetry.operation("match"):
        assert trace.get_current_span().is_recording()

    assert " # {" not in generate_latest(telemetry.registry).decode()


@pytest.mark.parametrize("sampler", [None, ALWAYS_OFF], ids=["no SDK", "unsampled"])
def test_an_unknown_step_is_counted_and_the_body_runs(clock: Clock, sampler: Sampler | None) -> None:
    """Also inside an operation that nothing records, and in a request that nothing records, a wrong name raises nothing."""
    telemetry = Telemetry(clock=clock) if sampler is None else make(clock, sampler)[0]
    ran = []
    with telemetry.operation("match") as match, telemetry.operation("nonsense"):  # type: ignore[arg-type]
        ran.append("step")
    with telemetry.operation("nonsense", match.trace):  # type: ignore[arg-type]
        ran.append("operation")

    assert ran == ["step", "operation"]
    assert (errors(telemetry) or 0) >= 2
    with telemetry.operation("match"):
        pass
    assert value(telemetry.registry, "operation_seconds_count", operation="match") == 2


def test_a_clock_that_failed_leaves_no_time_behind() -> None:
    """A step, or an operation of an unsampled request, whose start is not known has no time: not that since the one before."""
    clock, broken = Clock(), []

    def tell() -> float:
        if broken:
            raise RuntimeError(broken.pop())
        return clock()

    telemetry, _ = make(tell, ALWAYS_OFF)  # type: ignore[arg-type]
    with telemetry.operation("match") as match:
        pass
    for name, inside in (("restore", "free"), ("commit", "alloc")):
        for failing in (False, True):
            with telemetry.operation(name, match.trace):  # type: ignore[arg-type]
                broken.extend(["no time"] if failing else [])
                with telemetry.operation(inside):  # type: ignore[arg-type]
                    clock.tick(1)
            broken.extend(["no time"] if not failing else [])
        clock.tick(100)

    for name in ("restore", "free", "commit", "alloc"):
        assert value(telemetry.registry, "operation_seconds_sum", operation=name) == 1
        assert value(telemetry.registry, "operation_seconds_count", operation=name) == 1
    assert (errors(telemetry) or 0) >= 4


def test_an_unknown_operation_is_counted_and_the_body_runs(clock: Clock) -> None:
    """A name outside the catalogue makes no series and no span, but errors that can be seen."""
    telemetry, exporter = make(clock)
    ran = False
    with telemetry.operation("nonsense") as operation:  # type: ignore[arg-type]
        operation.set(depth=1)
        ran = True

    assert ran
    assert exporter.get_finished_spans() == ()
    assert value(telemetry.registry, "operation_seconds_count", operation="nonsense") is None
    assert errors(telemetry) == 2


@pytest.mark.parametrize("broken", ["start_span", "attach", "clock", "observe", "set_attributes", "detach", "end", "logger"])
def test_whatever_breaks_inside_is_contained(clock: Clock, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """Each thing an operation uses may raise: the body's exception passes, errors are counted, the next operation works."""
    telemetry, exporter = make(clock)

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError(broken)

    with monkeypatch.context() as patch:
        if broken == "start_span":
            patch.setattr(telemetry._instruments.tracing._tracer, "start_span", fail)
        elif broken == "attach":
            patch.setattr("opentelemetry.context.attach", fail)
        elif broken == "detach":
            patch.setattr("opentelemetry.context.detach", fail)
        elif broken == "clock":
            patch.setattr(telemetry._instruments, "clock", fail)
        elif broken == "observe":
            patch.setattr(telemetry._metrics.histograms["operation_seconds", "match"], "observe", fail)
        elif broken == "logger":
            structlog.configure(processors=[fail])
        else:
            patch.setattr(f"opentelemetry.sdk.trace.Span.{broken}", fail)

        with pytest.raises(KeyError, match="the body's"):
            copy_context().run(raise_within, telemetry)  # a context of its own, which a broken detach leaves dirty
    structlog.reset_defaults()

    assert (errors(telemetry) or 0) >= 1
    assert telemetry._instruments.current is None
    assert trace.get_current_span() is INVALID_SPAN
    if broken in ("clock", "observe", "set_attributes", "logger"):
        assert [span.name for span in exporter.get_finished_spans()] == ["mamba_checkpoint.match"]
    exporter.clear()
    with telemetry.operation("match"):
        clock.tick(1)
    assert [span.name for span in exporter.get_finished_spans()] == ["mamba_checkpoint.match"]


def test_debug_events_carry_time_attributes_and_trace(clock: Clock) -> None:
    """Where logs were asked for, each operation leaves an event with its attributes, also when no span records."""
    lines = LogCapture()
    logger = structlog.wrap_logger(None, processors=[lines])
    recorded, exporter = make(clock)
    provider = recorded._instruments.tracing._tracer
    for telemetry in (Telemetry("quiet", logger=logger, clock=clock), Telemetry("traced", logger=logger, clock=clock)):
        if lines.entries:
            telemetry._instruments.tracing._tracer = provider
        with telemetry.operation("match") as operation:
            operation.set(depth=3, reason=None)
            clock.tick(0.25)

    quiet, traced = lines.entries
    expected = {"event": "mamba_checkpoint.operation", "log_level": "debug", "operation": "match", "seconds": 0.25, "depth": 3}
    assert quiet == {**expected, "cache": "quiet"}
    context = exporter.get_finished_spans()[0].context
    assert context is not None
    assert traced == {**expected, "cache": "traced", "trace_id": f"{context.trace_id:032x}"}
