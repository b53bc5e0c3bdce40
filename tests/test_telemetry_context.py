"""Whose trace it is: requests of many threads and tasks, served on one thread; and log lines that say so."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import structlog
from cache_play import build
from engine_side import serve
from hash_model import greedy, hash_engine
from opentelemetry import context, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from structlog.testing import capture_logs
from telemetry_fakes import value

from mamba_checkpoint_cache import Telemetry, add_trace_ids
from mamba_checkpoint_cache.serving.engine_thread import EngineThread
from mamba_checkpoint_cache.serving.request import Request
from mamba_checkpoint_cache.telemetry import NULL


class Traces:
    """An SDK that keeps every span, and an application's own tracer."""

    def __init__(self) -> None:
        self.provider, self.exporter = TracerProvider(shutdown_on_exit=False), InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("application")

    def of(self, name: str) -> list[ReadableSpan]:
        """The spans of one trace, named by its root."""
        spans = self.exporter.get_finished_spans()
        root = next(span for span in spans if span.name == name)
        return [span for span in spans if span.context.trace_id == root.context.trace_id]


@pytest.fixture
def traces() -> Traces:
    return Traces()


def names(spans: list[ReadableSpan]) -> list[str]:
    return sorted(span.name.removeprefix("mamba_checkpoint.") for span in spans)


def test_calls_within_a_request_belong_to_it_on_any_thread(traces: Traces) -> None:
    """A context carried to another thread is the parent there, inner spans nest below, and nothing stays behind on the thread."""
    telemetry = Telemetry(tracer_provider=traces.provider)
    cache = build(telemetry)

    def work(parent: context.Context) -> None:
        with telemetry.within(parent):
            serve(cache, [1, 2, 3], 3)
            assert trace.get_current_span() is trace.INVALID_SPAN
        with telemetry.operation("match"):
            pass

    with traces.tracer.start_as_current_span("request"), ThreadPoolExecutor(1) as pool:
        pool.submit(work, context.get_current()).result()

    spans = traces.of("request")
    assert names(spans) == ["alloc", "alloc", "commit", "compress", "free", "match", "request", "restore"]
    by_id = {span.context.span_id: span.name for span in spans}
    parents = {span.name: by_id[span.parent.span_id] for span in spans if span.parent}
    assert parents["mamba_checkpoint.commit"] == parents["mamba_checkpoint.match"] == "request"
    assert parents["mamba_checkpoint.compress"] == "mamba_checkpoint.commit"


def test_a_request_without_a_trace_of_its_own_is_one_trace(traces: Traces) -> None:
    """Nothing is current: restore and commits follow the match in its trace, steps below them, and no second root appears."""
    cache = build(Telemetry(tracer_provider=traces.provider))
    serve(cache, [1, 2, 3], 2, 3)

    (root,) = (span for span in traces.exporter.get_finished_spans() if span.name == "mamba_checkpoint.match")
    found = traces.of("mamba_checkpoint.match")
    assert root.parent is None
    assert [names(found).count(name) for name in ("match", "restore", "commit", "compress")] == [1, 1, 2, 2]
    following = [span for span in found if span.name.endswith((".restore", ".commit"))]
    assert all(span.parent is not None and span.parent.span_id == root.context.span_id for span in following)


class Counting:
    """A tracer that tells what was started."""

    def __init__(self, tracer: trace.Tracer, started: list[str]) -> None:
        self.tracer, self.started = tracer, started

    def start_span(self, name: str, *arguments: object) -> trace.Span:
        self.started.append(name)
        return self.tracer.start_span(name, *arguments)  # type: ignore[arg-type]


class Once(Sampler):
    """Samples the roots as it is told, one after the other, and what has a parent as its parent."""

    def __init__(self, *decisions: Decision) -> None:
        self.decisions = list(decisions)

    def should_sample(self, parent_context: object, *_arguments: object, **_options: object) -> SamplingResult:
        parent = trace.get_current_span(parent_context).get_span_context()  # type: ignore[arg-type]
        if parent.is_valid:
            return SamplingResult(Decision.RECORD_AND_SAMPLE if parent.trace_flags.sampled else Decision.DROP)
        return SamplingResult(self.decisions.pop(0))

    def get_description(self) -> str:
        return "as told"


def test_a_request_is_sampled_as_a_whole() -> None:
    """One decision, at the match: of an unsampled request nothing is recorded or asked again, of a sampled one everything."""
    sampler, exporter = Once(Decision.DROP, Decision.RECORD_AND_SAMPLE), InMemorySpanExporter()
    provider = TracerProvider(sampler, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = Telemetry(tracer_provider=provider)
    cache = build(telemetry)
    cache.active.telemetry = NULL  # an allocation belongs to no request: a root of its own

    serve(cache, [1, 2, 3], 3)
    assert exporter.get_finished_spans() == ()
    serve(cache, [4, 5, 6], 3)

    assert names(list(exporter.get_finished_spans())) == ["alloc", "commit", "compress", "match", "restore"]
    assert sampler.decisions == []
    for operation in ("match", "restore", "commit", "compress"):
        assert value(telemetry.registry, "operation_seconds_count", operation=operation) == 2


@pytest.mark.parametrize("carried", ["nothing", "an unsampled span"])
def test_an_unsampled_request_costs_one_decision(carried: str) -> None:
    """Also where an engine carries each request's context to its own thread, whether a trace is in that or not."""
    sampler = Once(Decision.DROP, Decision.DROP)
    provider = TracerProvider(sampler, shutdown_on_exit=False)
    telemetry = Telemetry(tracer_provider=provider)
    cache = build(telemetry)
    parent = context.Context()
    if carried == "an unsampled span":
        parent = trace.set_span_in_context(provider.get_tracer("application").start_span("request"))
    started = []
    tracer = telemetry._instruments.tracing._tracer
    telemetry._instruments.tracing._tracer = Counting(tracer, started)

    with telemetry.within(parent):
        match = cache.match_prefix([1, 2, 3])
    slot = cache.active.allocate()
    assert slot is not None
    for _ in range(3):
        with telemetry.within(parent):
            cache.restore(match, slot)
        with telemetry.within(parent):
            cache.commit([1, 2, 3], depth=0, source=slot, lease=match)

    assert [name.removeprefix("mamba_checkpoint.") for name in started] == ["match", "alloc"]


def test_an_unsampled_match_does_not_silence_a_sampled_caller(traces: Traces) -> None:
    """What is current when a commit is made comes first: an unsampled match elsewhere takes nothing away from it."""
    sampler = Once(*[Decision.DROP, Decision.RECORD_AND_SAMPLE] * 2)
    provider = TracerProvider(sampler, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(traces.exporter))
    telemetry = Telemetry(tracer_provider=provider)
    cache = build(telemetry)
    cache.active.telemetry = NULL
    for parent in ("current", "within"):
        match = cache.match_prefix([1, 2, 3])
        slot = cache.active.allocate()
        assert slot is not None
        root = provider.get_tracer("application").start_span("caller")
        carried = trace.set_span_in_context(root)
        if parent == "current":
            token = context.attach(carried)
            cache.restore(match, slot)
            context.detach(token)
        else:
            with telemetry.within(carried):
                cache.restore(match, slot)
        cache.release(match)
        cache.active.free(slot)
        (span,) = traces.exporter.get_finished_spans()
        assert span.parent is not None
        assert span.parent.span_id == root.get_span_context().span_id
        traces.exporter.clear()


def test_within_undoes_itself_and_may_be_nested(traces: Traces) -> None:
    """The inner parent counts, then the outer again, then what is current; also when the body raises."""
    telemetry = Telemetry(tracer_provider=traces.provider)
    parents = {name: trace.set_span_in_context(traces.tracer.start_span(name)) for name in ("outer", "inner")}

    def look() -> int:
        with telemetry.operation("match"):
            return trace.get_current_span().get_span_context().trace_id

    with telemetry.within(parents["outer"]):
        with suppress(KeyError), telemetry.within(parents["inner"]):
            assert look() == trace.get_current_span(parents["inner"]).get_span_context().trace_id
            raise KeyError
        assert look() == trace.get_current_span(parents["outer"]).get_span_context().trace_id
        with telemetry.within(None), traces.tracer.start_as_current_span("current") as current:
            assert look() == current.get_span_context().trace_id
    assert look() not in {trace.get_current_span(parent).get_span_context().trace_id for parent in parents.values()}
    with NULL.within(parents["outer"]):
        pass


def test_requests_of_many_tasks_keep_their_traces(traces: Traces) -> None:
    """Twenty tasks send requests to one engine thread: each finds its own match, restore and commit in its trace, no other's."""
    telemetry = Telemetry(tracer_provider=traces.provider)
    thread = EngineThread(lambda: hash_engine(telemetry=telemetry, checkpoint_slots=64))
    thread.start()

    async def ask(number: int) -> None:
        with traces.tracer.start_as_current_span(f"request {number}"):
            request = Request(list(f"prompt of its own {number}".encode()), greedy(3))
            thread.submit(request)
            while request.finish is None:
                await asyncio.sleep(0.005)

    async def ask_all() -> None:
        async with asyncio.timeout(20):
            await asyncio.gather(*map(ask, range(20)))

    asyncio.run(ask_all())
    assert thread.stop(5)
    for number in range(20):
        found = names(traces.of(f"request {number}"))
        assert [found.count(name) for name in ("match", "restore")] == [1, 1]
        assert found.count("commit") >= 1
    assert threading.active_count() == 1


def test_the_processor_adds_the_ids_of_the_current_span(traces: Traces) -> None:
    """Within a span a line of anybody's carries its ids; outside, or with ids of its own, it stays as it is."""
    with capture_logs(processors=[add_trace_ids]) as lines:
        structlog.get_logger().info("outside")
        with traces.tracer.start_as_current_span("request") as span:
            structlog.get_logger().info("inside")
            structlog.get_logger().info("its own", trace_id="x", span_id="y")

    span_context = span.get_span_context()
    ids = {"trace_id": f"{span_context.trace_id:032x}", "span_id": f"{span_context.span_id:016x}"}
    assert lines == [
        {"event": "outside", "log_level": "info"},
        {"event": "inside", "log_level": "info", **ids},
        {"event": "its own", "log_level": "info", "trace_id": "x", "span_id": "y"},
    ]
