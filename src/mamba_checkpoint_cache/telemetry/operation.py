"""One operation of the cache while it runs: a time, a span, attributes."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Token
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span, SpanContext

from mamba_checkpoint_cache.telemetry.catalogue import OperationName
from mamba_checkpoint_cache.telemetry.containment import Containment
from mamba_checkpoint_cache.telemetry.logs import Logs
from mamba_checkpoint_cache.telemetry.metrics import Metrics
from mamba_checkpoint_cache.telemetry.tracing import Scalar, Tracing, plain, sampled, trace_id


@dataclass(slots=True)
class Instruments:
    """What one cache records with, and the innermost operation that is running on its one recording thread."""

    metrics: Metrics
    tracing: Tracing
    logs: Logs
    contained: Containment
    clock: Callable[[], float]
    current: Operation | None = None


class Operation:
    """A context manager around one operation: timed into the histogram, and a span while something records.

    What the body raises passes through; the span notes it.
    """

    __slots__ = ("_attributes", "_instruments", "_started", "_token", "exemplar", "name", "outer", "span")

    def __init__(self, instruments: Instruments, name: OperationName) -> None:
        self.name = name
        self.outer: Operation | None = None
        self.span: Span = INVALID_SPAN
        self.exemplar: dict[str, str] | None = None
        self._instruments = instruments
        self._token: Token[Context] | None = None
        self._attributes: dict[str, Any] | None = None

    def set(self, **attributes: Any) -> None:
        """Note plain scalars, which become attributes of the span; costs next to nothing while nothing records."""
        if self._attributes is not None:
            self._attributes.update(attributes)

    def commit(self) -> SpanContext | None:
        """The context of the commit that this operation is, or is inside; None unless that was sampled."""
        operation: Operation | None = self
        while operation is not None and operation.name != "commit":
            operation = operation.outer
        return None if operation is None else sampled(operation.span)

    def __enter__(self) -> Self:
        try:  # rather than ``with contained``: this runs twice per operation
            self._open()
        except Exception as error:  # noqa: BLE001
            self._instruments.contained.on_error(error)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            self._close(error)
        except Exception as failure:  # noqa: BLE001
            self._instruments.contained.on_error(failure)

    def _open(self) -> None:
        tools = self._instruments
        outer = self.outer = tools.current
        tools.current = self
        try:
            if outer is None or outer.span.is_recording():  # inside a span that nobody keeps, none is worth its price
                self.span, self._token = tools.tracing.start(self.name)
            recording = self.span.is_recording()
            if recording and (context := sampled(self.span)) is not None:
                self.exemplar = {"trace_id": trace_id(context)}
            if recording or tools.logs.detailed():
                self._attributes = {}
        finally:
            self._started = tools.clock()

    def _close(self, error: BaseException | None) -> None:
        tools = self._instruments
        tools.current = self.outer
        attributes: dict[str, Scalar] = {}
        try:
            seconds = tools.clock() - self._started
            tools.metrics.observe("operation_seconds", self.name, value=seconds, exemplar=self.exemplar)
            if self._attributes is not None:
                attributes = plain(self._attributes, tools.contained)
                tools.logs.operation(self.name, seconds, attributes)
        finally:
            if self.span is not INVALID_SPAN:
                tools.tracing.finish(self.span, self._token, attributes, error)
