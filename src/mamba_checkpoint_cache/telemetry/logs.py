"""Log lines through structlog, which this package never configures."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import structlog
from opentelemetry import trace

from mamba_checkpoint_cache.telemetry.catalogue import OPERATION_DONE, LogEvent
from mamba_checkpoint_cache.telemetry.tracing import span_id, trace_id

INTERVAL_SECONDS = 60.0


class Logs:
    """The log of one cache: warnings and errors at most once a minute per event, details only for those who asked.

    A structlog that nobody configured prints every level to stdout, so an event per operation is written only through a
    ``logger`` that was passed in, or once structlog is configured.
    """

    def __init__(self, cache: str, logger: Any | None, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._asked = logger is not None
        self._logger = structlog.get_logger() if logger is None else logger
        self._bound: Any | None = None
        self._clock = clock
        self._last: dict[str, float] = {}
        self._suppressed: dict[str, int] = {}

    def emit(self, event: LogEvent, **fields: Any) -> None:
        """Write one line, unless the same event had one within the interval: the next line then counts what was held back."""
        now = self._clock()
        if now - self._last.get(event.name, -math.inf) < INTERVAL_SECONDS:
            self._suppressed[event.name] = self._suppressed.get(event.name, 0) + 1
            return
        self._last[event.name] = now
        if suppressed := self._suppressed.pop(event.name, 0):
            fields["suppressed"] = suppressed
        getattr(self._logger, event.level)(event.name, cache=self._cache, **fields, **_trace())

    def detailed(self) -> bool:
        """Whether an event per operation is wanted now: somebody asked for logs, and their level lets debug through."""
        if not (self._asked or structlog.is_configured()):
            return False
        if self._bound is None:
            self._bound = self._logger.bind()  # binding costs microseconds: once, not for each operation
        enabled = getattr(self._bound, "is_enabled_for", None)  # structlog 25.1
        return enabled is None or bool(enabled(logging.DEBUG))

    def operation(self, operation: str, seconds: float, attributes: Mapping[str, Any]) -> None:
        """Write the event of one operation, if ``detailed``."""
        if self.detailed() and self._bound is not None:
            fields = {**attributes, "cache": self._cache, "operation": operation, "seconds": seconds, **_trace()}
            self._bound.debug(OPERATION_DONE.name, **fields)


def add_trace_ids(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor that adds ``trace_id`` and ``span_id`` of the current span to any line, also an application's own.

    To be put among the processors that an application configures; this package configures none. A line written outside of any
    span, or with ids of its own, stays as it is.
    """
    span_context = trace.get_current_span().get_span_context()
    if span_context.is_valid:
        event.setdefault("trace_id", trace_id(span_context))
        event.setdefault("span_id", span_id(span_context))
    return event


def _trace() -> dict[str, str]:
    span = trace.get_current_span()
    return {"trace_id": trace_id(span.get_span_context())} if span.is_recording() else {}
