"""Log lines: few, and none of an operation's unless somebody asked."""

from __future__ import annotations

import logging

import pytest
import structlog
from opentelemetry.sdk.trace import TracerProvider
from structlog.testing import LogCapture, capture_logs
from telemetry_fakes import Clock

from mamba_checkpoint_cache.telemetry.catalogue import SLOTS_EXHAUSTED, STATE_NON_FINITE
from mamba_checkpoint_cache.telemetry.logs import Logs


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_burst_makes_one_line_and_the_next_says_how_many(clock: Clock) -> None:
    """A thousand failures make one line (fault 1); the first after the interval counts those held back, and starts afresh."""
    logs = Logs("default", None, clock)
    with capture_logs() as lines:
        for _ in range(1000):
            logs.emit(SLOTS_EXHAUSTED, reason="exhausted")
            clock.tick(0.05)
        assert lines == [
            {"event": "mamba_checkpoint.slots_exhausted", "log_level": "warning", "cache": "default", "reason": "exhausted"}
        ]

        clock.tick(11)
        logs.emit(SLOTS_EXHAUSTED, reason="all_locked")
        clock.tick(61)
        logs.emit(SLOTS_EXHAUSTED, reason="all_locked")

    assert [line.get("suppressed") for line in lines] == [None, 999, None]


def test_events_are_limited_each_by_itself(clock: Clock) -> None:
    """A burst of one event doesn't silence another."""
    logs = Logs("default", None, clock)
    with capture_logs() as lines:
        logs.emit(SLOTS_EXHAUSTED, reason="exhausted")
        logs.emit(STATE_NON_FINITE)
        logs.emit(STATE_NON_FINITE)

    assert [(line["event"], line["log_level"]) for line in lines] == [
        ("mamba_checkpoint.slots_exhausted", "warning"),
        ("mamba_checkpoint.state_non_finite", "error"),
    ]


def test_lines_carry_the_trace_id_while_a_span_records(clock: Clock) -> None:
    """Inside a recording span a line can be found from its trace; outside there is no such field."""
    logs = Logs("default", None, clock)
    with capture_logs() as lines:
        logs.emit(STATE_NON_FINITE)
        clock.tick(100)
        with TracerProvider().get_tracer("x").start_as_current_span("x") as span:
            logs.emit(STATE_NON_FINITE)

    assert "trace_id" not in lines[0]
    assert lines[1]["trace_id"] == f"{span.get_span_context().trace_id:032x}"


def test_who_configured_nothing_sees_warnings_only(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """Unconfigured structlog prints every level to stdout: operations stay silent there, warnings are printed."""
    logs = Logs("default", None, clock)

    logs.operation("match", 0.1, {})
    assert not logs.detailed()
    assert capsys.readouterr() == ("", "")

    logs.emit(SLOTS_EXHAUSTED, reason="exhausted")
    assert "slots_exhausted" in capsys.readouterr().out
    assert not structlog.is_configured()


def test_operations_are_logged_once_structlog_is_configured(clock: Clock) -> None:
    """An application that configures structlog, even after it built the cache, gets an event per operation at debug."""
    logs = Logs("default", None, clock)
    assert not logs.detailed()
    lines = LogCapture()
    structlog.configure(processors=[lines])

    assert logs.detailed()
    logs.operation("match", 0.5, {"depth": 3, "cache": "not this"})

    assert lines.entries == [
        {
            "event": "mamba_checkpoint.operation",
            "log_level": "debug",
            "cache": "default",
            "operation": "match",
            "seconds": 0.5,
            "depth": 3,
        }
    ]


def test_a_level_above_debug_switches_operations_off(clock: Clock) -> None:
    """Where debug is filtered out, nothing is even prepared."""
    lines = LogCapture()
    structlog.configure(processors=[lines], wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    logs = Logs("default", None, clock)

    logs.operation("match", 0.5, {})

    assert not logs.detailed()
    assert lines.entries == []


def test_an_injected_logger_is_the_one_used(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """A logger that was passed in gets warnings and operations, whatever structlog's own configuration is."""
    lines = LogCapture()
    logs = Logs("default", structlog.wrap_logger(None, processors=[lines]), clock)

    logs.emit(SLOTS_EXHAUSTED, reason="exhausted")
    logs.operation("match", 0.5, {})

    assert [line["log_level"] for line in lines.entries] == ["warning", "debug"]
    assert not structlog.is_configured()
    assert capsys.readouterr() == ("", "")
