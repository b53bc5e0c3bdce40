"""Spans through the OpenTelemetry API."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from opentelemetry import context, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler
from opentelemetry.trace import INVALID_SPAN, NonRecordingSpan, SpanContext, StatusCode, TraceFlags

from mamba_checkpoint_cache.telemetry.catalogue import OPERATIONS, SPANS, VERSION
from mamba_checkpoint_cache.telemetry.containment import Containment
from mamba_checkpoint_cache.telemetry.tracing import Tracing, plain, sampled, trace_id


def provide(sampler: Sampler = ALWAYS_ON) -> tuple[TracerProvider, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=sampler)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider, exporter


def record(operation: str, attributes: dict[str, object], error: BaseException | None = None) -> ReadableSpan:
    provider, exporter = provide()
    tracing = Tracing("default", provider)
    span, _, token = tracing.start(operation)  # type: ignore[arg-type]
    tracing.finish(span, token, attributes, error)  # type: ignore[arg-type]
    return exporter.get_finished_spans()[0]


def test_spans_are_named_by_the_catalogue_and_the_tracer_by_the_package() -> None:
    """Every operation has its span, from a tracer with the package's name and version."""
    for operation, span in zip(OPERATIONS, (record(operation, {}) for operation in OPERATIONS), strict=True):
        assert span.name == f"mamba_checkpoint.{operation}"
        assert span.name in {entry.full_name for entry in SPANS}
        assert span.instrumentation_scope is not None
        assert (span.instrumentation_scope.name, span.instrumentation_scope.version) == ("mamba_checkpoint_cache", VERSION)


def test_attributes_carry_the_prefix_and_the_cache() -> None:
    """Attributes are exported as mamba_checkpoint.<key>, with the name of the cache among them."""
    span = record("match", {"depth": 7, "outcome": "hit"})

    assert dict(span.attributes or {}) == {
        "mamba_checkpoint.cache": "default",
        "mamba_checkpoint.depth": 7,
        "mamba_checkpoint.outcome": "hit",
    }


def test_a_started_span_is_current_until_finished() -> None:
    """Spans of others nest inside ours, and what was current before is current again afterwards."""
    provider, exporter = provide()
    tracing = Tracing("default", provider)
    with provider.get_tracer("engine").start_as_current_span("request") as request:
        span, _, token = tracing.start("commit")
        with provider.get_tracer("engine").start_as_current_span("callback"):
            pass
        tracing.finish(span, token, {}, None)
        assert trace.get_current_span() is request

    callback, commit, _ = exporter.get_finished_spans()
    assert callback.parent == commit.context
    assert commit.parent == request.get_span_context()


def test_an_unsampled_span_keeps_spans_inside_unsampled() -> None:
    """A span inside an unsampled one belongs to its trace, rather than being sampled as a root of its own."""
    provider, exporter = provide(ALWAYS_OFF)
    tracing = Tracing("default", provider)
    span, _, token = tracing.start("commit")

    inner = trace.get_current_span().get_span_context()
    assert inner == span.get_span_context()
    assert not inner.trace_flags.sampled

    tracing.finish(span, token, {"depth": 1}, None)
    assert trace.get_current_span() is INVALID_SPAN
    assert exporter.get_finished_spans() == ()


def test_without_sdk_nothing_becomes_current() -> None:
    """With no tracer provider configured there is no span, no context, and nothing to undo."""
    span, _, token = Tracing("default", None).start("match")

    assert span is INVALID_SPAN
    assert token is None


def test_an_error_is_noted_with_status_and_event() -> None:
    """What the body raised is in the span; an interrupt is not called an error."""
    span = record("commit", {}, ValueError("no such depth"))
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "ValueError: no such depth"
    assert [event.name for event in span.events] == ["exception"]

    span = record("commit", {}, KeyboardInterrupt())
    assert span.status.status_code is StatusCode.UNSET
    assert span.events == ()


def test_a_span_ends_even_if_its_attributes_fail() -> None:
    """If setting attributes raises, the span still ends and the context is restored."""
    provider, exporter = provide()
    tracing = Tracing("default", provider)
    span, _, token = tracing.start("match")
    span.set_attributes = lambda attributes: 1 / 0  # type: ignore[method-assign,assignment,return-value]

    with pytest.raises(ZeroDivisionError):
        tracing.finish(span, token, {}, None)

    assert [finished.name for finished in exporter.get_finished_spans()] == ["mamba_checkpoint.match"]
    assert trace.get_current_span() is INVALID_SPAN


def test_a_provider_set_later_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """An application that configures its SDK after it has built the cache gets the spans all the same."""
    tracing = Tracing("default", None)
    provider, exporter = provide()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)

    span, _, token = tracing.start("match")
    tracing.finish(span, token, {}, None)

    assert len(exporter.get_finished_spans()) == 1


def test_plain_keeps_scalars_and_converts_numpys() -> None:
    """Numbers, strings and booleans are kept with their Python types; None is left out in silence."""
    kept = plain(
        {"a": 1, "b": 2.5, "c": "x", "d": True, "e": None, "f": np.int64(3), "g": np.float32(0.5), "h": np.float64(0.25)},
        Containment(pytest.fail),
    )

    assert kept == {"a": 1, "b": 2.5, "c": "x", "d": True, "f": 3, "g": 0.5, "h": 0.25}
    assert [type(value) for value in kept.values()] == [int, float, str, bool, int, float, float]


@pytest.mark.parametrize("value", [torch.tensor(1), torch.zeros(2, 2), [1, 2], (1,), {"a": 1}, object(), b"x", np.zeros(2)])
def test_plain_refuses_everything_else(value: object) -> None:
    """Tensors, even of one number, and collections are dropped, each is reported, and the rest is kept (fault 34)."""
    errors: list[Exception] = []

    assert plain({"bad": value, "good": 1}, Containment(errors.append)) == {"good": 1}
    assert [str(error).startswith("span attribute bad must be a plain scalar") for error in errors] == [True]


def test_sampled_tells_whether_a_trace_store_will_have_it() -> None:
    """Only the context of a sampled span is given; its trace id is the usual 32 hex digits."""
    there = SpanContext(0xAB, 0xCD, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    lost = SpanContext(0xAB, 0xCD, is_remote=False)

    assert sampled(NonRecordingSpan(there)) is there
    assert sampled(NonRecordingSpan(lost)) is None
    assert sampled(INVALID_SPAN) is None
    assert trace_id(there) == "000000000000000000000000000000ab"
    assert context.get_current() == {}
