"""One operation of the cache while it runs: a time, a span, attributes."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Token
from dataclasses import dataclass
from math import nan
from types import TracebackType
from typing import Any, Self

from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span, SpanContext

from mamba_checkpoint_cache.telemetry.catalogue import OperationName
from mamba_checkpoint_cache.telemetry.containment import Containment
from mamba_checkpoint_cache.telemetry.logs import Logs
from mamba_checkpoint_cache.telemetry.metrics import Metrics
from mamba_checkpoint_cache.telemetry.tracing import Scalar, Trace, Tracing, plain, sampled, trace_id


@dataclass(slots=True)
class Instruments:
    """What one cache records with, and the innermost operation that is running on its one recording thread."""

    metrics: Metrics
    tracing: Tracing
    logs: Logs
    contained: Containment
    clock: Callable[[], float]
    current: Operation | None = None
    parent: Context | None = None
    """What spans of the calls now being made belong to; None: to whatever is current on the thread."""


class Operation:
    """A context manager around one operation: timed into the histogram, and a span while something records.

    What the body raises passes through; the span notes it.
    """

    outer: Operation | None = None
    span: Span = INVALID_SPAN
    trace: Trace | None = None
    """For later operations of the same request; before the operation starts, that of an earlier one."""
    recording = False
    unheard = True
    """Neither a span nor a log line will tell of it."""
    exemplar: dict[str, str] | None = None
    _token: Token[Context] | None = None

    def __init__(self, instruments: Instruments, name: OperationName, trace: Trace | None = None) -> None:
        self.name = name
        self._instruments = instruments
        if trace is not None:
            self.trace = trace

    def set(self, **attributes: Any) -> None:
        """Note plain scalars, which become attributes of the span; costs next to nothing while nothing records."""
        if not self.unheard:
            self._attributes.update(attributes)

    def commit(self) -> SpanContext | None:
        """The context of the commit that this operation is, or is inside; None unless that was sampled."""
        operation: Operation | None = self
        while operation is not None and operation.name != "commit":
            operation = operation.outer
        return None if operation is None else sampled(operation.span)

    def __enter__(self) -> Self:
        tools = self._instruments
        outer = self.outer = tools.current
        tools.current = self
        try:  # rather than ``with contained``: this runs twice per operation
            try:
                if outer is None or outer.recording:  # inside a span that nobody keeps, none is worth its price
                    self._start_span()
                if self.recording or tools.logs.detailed():
                    self._attributes: dict[str, Any] = {}
                    self.unheard = False
                    if self.trace is not None:
                        self.trace.heard = True
            finally:
                self._started = tools.clock()
        except Exception as error:  # noqa: BLE001
            tools.contained.on_error(error)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        tools = self._instruments
        tools.current = self.outer
        attributes: dict[str, Scalar] = {}
        try:
            try:
                seconds = tools.clock() - self._started
                tools.metrics.seconds[self.name].observe(seconds, self.exemplar)
                if not self.unheard:
                    attributes = plain(self._attributes, tools.contained)
                    tools.logs.operation(self.name, seconds, attributes)
            finally:
                if self.span is not INVALID_SPAN:
                    tools.tracing.finish(self.span, self._token, attributes, error)
                if self.outer is None:
                    tools.metrics.publish()
        except Exception as failure:  # noqa: BLE001
            tools.contained.on_error(failure)

    def _start_span(self) -> None:
        tools = self._instruments
        parent = tools.parent if self.outer is None else None
        self.span, self.trace, self._token = tools.tracing.start(self.name, parent, self.trace)
        self.recording = self.span.is_recording()
        if self.recording and (context := sampled(self.span)) is not None:
            self.exemplar = {"trace_id": trace_id(context)}


class Within:
    """A block whose calls belong to ``parent``. Nothing is attached to the thread, so nothing is left there either."""

    __slots__ = ("_before", "_instruments", "_parent")

    def __init__(self, instruments: Instruments, parent: Context | None) -> None:
        self._instruments = instruments
        self._parent = parent

    def __enter__(self) -> None:
        self._before = self._instruments.parent
        self._instruments.parent = self._parent

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._instruments.parent = self._before


class Step(Operation):
    """An operation inside one that nothing records: timed, and no more, for the price of a commit is mostly that of its steps.

    One object serves every step of its name, since none runs inside another of the same name.
    """

    def __init__(self, instruments: Instruments, name: OperationName) -> None:
        super().__init__(instruments, name)
        self._clock = instruments.clock
        self._took = instruments.metrics.seconds[name].fresh.append

    def set(self, **attributes: Any) -> None:
        """Nothing: nobody would read them."""

    def __enter__(self) -> Self:
        try:
            self._started = self._clock()
        except Exception as error:  # noqa: BLE001
            self._started = nan  # or else the time would run from the step before
            self._instruments.contained.on_error(error)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            self._took(self._clock() - self._started)
        except Exception as failure:  # noqa: BLE001
            self._instruments.contained.on_error(failure)


class Silent(Step):
    """An operation of a request that nothing records, in the same surroundings as the first. It makes nothing current."""

    def __enter__(self) -> Self:
        tools = self._instruments
        tools.current = self
        try:  # rather than through ``super``: this runs at every commit
            self._started = self._clock()
        except Exception as error:  # noqa: BLE001
            self._started = nan
            tools.contained.on_error(error)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        tools = self._instruments
        tools.current = None
        try:
            self._took(self._clock() - self._started)
            tools.metrics.publish()
        except Exception as failure:  # noqa: BLE001
            tools.contained.on_error(failure)
