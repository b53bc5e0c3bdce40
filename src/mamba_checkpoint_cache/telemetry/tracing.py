"""Spans around the operations of a cache, through the OpenTelemetry API alone: who embeds the cache brings an SDK, or none."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import Token
from dataclasses import dataclass
from numbers import Integral, Real

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span, SpanContext, Status, StatusCode, TracerProvider

from mamba_checkpoint_cache.telemetry.catalogue import PREFIX, SCOPE, SPANS, VERSION, OperationName, SpanEvent
from mamba_checkpoint_cache.telemetry.containment import Containment

Scalar = str | bool | int | float
SPAN_NAMES = {span.operation: span.full_name for span in SPANS}


@dataclass(slots=True)
class Trace:
    """What the first operation of a request ran in, for those that follow: its own context, and what was around it.

    ``heard`` says whether a span or a log line tells of it.
    """

    context: Context
    outside: Context
    heard: bool = False


class Tracing:
    """Opens and ends the spans of one cache; without ``tracer_provider``, through whichever is global when a span starts."""

    def __init__(self, cache: str, tracer_provider: TracerProvider | None) -> None:
        self._cache = cache
        self._tracer = trace.get_tracer(SCOPE, VERSION, tracer_provider)

    def start(
        self, operation: OperationName, parent: Context | None = None, earlier: Trace | None = None
    ) -> tuple[Span, Trace | None, Token[Context] | None]:
        """Start a span under ``parent``, or what is current, or else in the trace of the ``earlier`` operation of its request.

        It becomes current, so that others nest in it; the token ends that. An unsampled span becomes current too, or else spans
        inside would be sampled as roots of their own. Where there is no SDK and no trace to continue, there is nothing to make
        current, which is what makes that case cheap.
        """
        outside = around(parent)
        if earlier is not None and trace.get_current_span(parent) is INVALID_SPAN:
            parent = earlier.context
        span = self._tracer.start_span(SPAN_NAMES[operation], parent)
        if span is INVALID_SPAN:
            return span, None, None
        inside = trace.set_span_in_context(span, parent)
        return span, Trace(inside, outside), context.attach(inside)

    def finish(
        self, span: Span, token: Token[Context] | None, attributes: Mapping[str, Scalar], error: BaseException | None
    ) -> None:
        """End the span, whatever happens to its attributes; ``error`` is what the body raised."""
        try:
            if span.is_recording():
                span.set_attributes(self._named(attributes))
                if isinstance(error, Exception):
                    span.record_exception(error)
                    span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        finally:
            if token is not None:
                context.detach(token)
            span.end()

    def event(self, event: SpanEvent, attributes: Mapping[str, Scalar]) -> None:
        """Put an event on the span that is current, whoever opened it."""
        trace.get_current_span().add_event(event.full_name, self._named(attributes))

    def _named(self, attributes: Mapping[str, Scalar]) -> dict[str, Scalar]:
        return {f"{PREFIX}.{key}": value for key, value in {"cache": self._cache, **attributes}.items()}


def around(parent: Context | None) -> Context:
    """What an operation with this ``parent`` runs in: that, or what is current."""
    return context.get_current() if parent is None else parent


def sampled(span: Span) -> SpanContext | None:
    """The context of a span that will reach a trace store; None for any other."""
    span_context = span.get_span_context()
    return span_context if span_context.trace_flags.sampled else None


def span_id(span_context: SpanContext) -> str:
    """Sixteen hex digits, as trace stores show them."""
    return trace.format_span_id(span_context.span_id)


def trace_id(span_context: SpanContext) -> str:
    """Thirty-two hex digits, as trace stores show them."""
    return trace.format_trace_id(span_context.trace_id)


def plain(attributes: Mapping[str, object], contained: Containment) -> dict[str, Scalar]:
    """The attributes that are numbers, strings or booleans; None is left out, anything else ends in ``contained``.

    A tensor is refused even if it holds one number: reading it could wait for a device.
    """
    kept: dict[str, Scalar] = {}
    for key, value in attributes.items():
        if value is not None:
            with contained:
                kept[key] = _scalar(key, value)
    return kept


def _scalar(key: str, value: object) -> Scalar:
    if isinstance(value, str | bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"span attribute {key} must be a plain scalar, got {type(value).__name__}")
