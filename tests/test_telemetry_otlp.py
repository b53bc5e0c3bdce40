"""Spans over OTLP to somebody who is not there, or who never answers (fault 34)."""

from __future__ import annotations

import gzip
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TESTS = Path(__file__).parent
PATH = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])


@contextmanager
def closed_port() -> Iterator[str]:
    """Where nobody listens: a port that is bound all the time, so that nobody else can have it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@contextmanager
def hanging_receiver() -> Iterator[str]:
    """One who takes every connection, and never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def receiver(spans: list) -> Iterator[str]:
    """One who keeps what arrives."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            sent = ExportTraceServiceRequest.FromString(body)
            spans.extend(span for r in sent.resource_spans for scope in r.scope_spans for span in scope.spans)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def run(*endpoint: str) -> tuple[dict, float, int]:
    """What an application served, the seconds from its last reply to its end, and its exit code."""
    environment = {**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, str(TESTS / "otlp_side.py"), *endpoint],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    with process:
        served = json.loads(process.stdout.readline())
        ended = time.perf_counter()
        code = process.wait(30)
    return served, time.perf_counter() - ended, code


@pytest.mark.parametrize("somebody", [closed_port, hanging_receiver])
def test_a_receiver_that_is_gone_or_hangs_harms_nobody(somebody) -> None:
    """Every output is right, serving waits for no receiver, and the process ends within five seconds."""
    with somebody() as endpoint:
        served, exit_seconds, code = run(endpoint)

    assert served["right"] == [True] * 20
    assert served["seconds"] < 2, "serving waited for the receiver"
    assert served["errors"] == 0
    assert (code, exit_seconds < 5) == (0, True), exit_seconds


def test_spans_arrive_where_somebody_listens() -> None:
    """The same application, with a receiver: all spans of all requests arrive, with their parents and plain attributes."""
    spans: list = []
    with receiver(spans) as endpoint:
        served, exit_seconds, code = run(endpoint)

    assert (served["right"], code, exit_seconds < 5) == ([True] * 20, 0, True)
    names = [span.name for span in spans]
    assert [names.count(f"mamba_checkpoint.{name}") for name in ("match", "restore")] == [20, 20]
    parents = {span.span_id: span.name for span in spans}
    compressing = {parents[span.parent_span_id] for span in spans if span.name == "mamba_checkpoint.compress"}
    assert compressing == {"mamba_checkpoint.commit"}
    assert all(attribute.key.startswith("mamba_checkpoint.") for span in spans for attribute in span.attributes)
