"""What came over OTLP, decoded."""

from __future__ import annotations

from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tools import Received


class Link(NamedTuple):
    """What identifies a span anywhere."""

    trace_id: bytes
    span_id: bytes


class ReceivedSpan(NamedTuple):
    """A span as it arrived. ``parent`` is empty at the root of a trace."""

    name: str
    trace_id: bytes
    span_id: bytes
    parent: bytes
    links: list[Link]
    attributes: dict[str, Any]
    resource: dict[str, Any]
    start: int
    end: int


def spans_of(received: Received) -> list[ReceivedSpan]:
    """All spans, in the order of arrival."""
    return [
        ReceivedSpan(
            span.name,
            span.trace_id,
            span.span_id,
            span.parent_span_id,
            [Link(link.trace_id, link.span_id) for link in span.links],
            _plain(span.attributes),
            _plain(part.resource.attributes),
            span.start_time_unix_nano,
            span.end_time_unix_nano,
        )
        for path, body in list(received)
        if path == "/v1/traces"
        for part in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in part.scope_spans
        for span in scope.spans
    ]


def _plain(attributes: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in attributes}
