"""Programs that tests of the whole stack need beside Python, and how they are started on loopback and stopped."""

from __future__ import annotations

import gzip
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TypeVar

import httpx
import pytest

T = TypeVar("T")

PACKAGES = {
    "amtool": "prometheus-alertmanager",
    "docker-compose": "docker-compose",
    "prometheus": "prometheus",
    "prometheus-alertmanager": "prometheus-alertmanager",
    "promtool": "prometheus",
}
"""The Debian package that brings each tool."""
ROTEL = "rotel"


def require_tool(name: str) -> str:
    """The path of a program. Where it is missing, the test is skipped; or it fails, if ``CI_REQUIRES_TOOLS`` is set."""
    if path := shutil.which(name):
        return path
    return _missing(f"{name} is not installed (Debian: {PACKAGES.get(name, name)})")


def require_rotel() -> str:
    """The path of the OTLP receiver that comes as a Python package."""
    try:
        import rotel
    except ModuleNotFoundError:
        return _missing("rotel is not installed (pip install --pre rotel)")
    return str(Path(rotel.__file__).with_name("rotel-agent"))


def _missing(message: str) -> str:
    if os.environ.get("CI_REQUIRES_TOOLS"):
        pytest.fail(message)
    pytest.skip(message)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(what: str, condition: Callable[[], T], seconds: float, every: float = 0.1) -> T:
    """The first truthy value of ``condition``; the test fails if there is none in time. A refused connection is no value."""
    deadline, last = time.monotonic() + seconds, None
    while time.monotonic() < deadline:
        try:
            if last := condition():
                return last
        except httpx.TransportError as error:
            last = error
        time.sleep(every)
    pytest.fail(f"waited {seconds} s for {what}, last seen: {last!r}")


@contextmanager
def running(command: list[str], ready: str, log: Path) -> Iterator[None]:
    """A program while it runs, from when ``ready`` answers 200 (a port alone: from when it is open) until it is stopped."""
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output, cwd=log.parent) as process:

        def answers() -> bool:
            if process.poll() is not None:
                pytest.fail(f"{command[0]} ended with {process.returncode}:\n{log.read_text()[-2000:]}")
            return httpx.get(ready, trust_env=False).status_code == 200 if "://" in ready else _open(int(ready))

        try:
            wait_for(ready, answers, 30)
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Received(list[tuple[str, bytes]]):
    """What a receiver got: path and body of each POST, in the order of arrival. ``url`` is where it listens."""

    url = ""


@contextmanager
def http_receiver(seconds: float = 0.0) -> Iterator[Received]:
    """Takes every POST and answers 200, after ``seconds``, which may be longer than anybody waits."""
    received, stop = Received(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            path = self.requestline.split()[1]  # as it came, where ``self.path`` is made tidy
            received.append((path, gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body))
            stop.wait(seconds)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.handle_error = lambda *_: None  # who asked has gone
        received.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield received
        finally:
            stop.set()
            server.shutdown()
            thread.join()
