"""Load: the demo's traffic against a server that runs already."""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from serving_side import COMMAND_LINE, ServerProcess
from tools import http_receiver, wait_for

from mamba_checkpoint_cache.serving import load
from mamba_checkpoint_cache.serving.options import OptionError
from mamba_checkpoint_cache.serving.scrape import Scrape

CODE = Path(__file__).with_name("hash_server.py").read_text(encoding="utf-8")
SESSIONS = {"chats": 2, "agents": 0, "forks": 0, "resends": 1}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("0", "0", "1", code=CODE) as process:
        process.wait_until_listening()
        yield process


def lookups(server: ServerProcess) -> int:
    return sum(Scrape(server.client.get("/metrics").text).by("lookups_total", "outcome").values())


def test_each_round_is_another_workload(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many rounds, each with other prompts, and what came of them as the rows of a table."""
    monkeypatch.setattr(load, "SESSIONS", SESSIONS)

    rows = load.run(str(server.client.base_url), pause=0.0, rounds=2)["rows"]

    assert [row["workload"] for row in rows] == [0, 1]
    assert sum(row["requests"] for row in rows) == lookups(server)
    assert rows[0]["requests"] != rows[1]["requests"]
    assert all(row["cached_tokens"] > 0 for row in rows)


def test_ctrl_c_ends_it(server: ServerProcess) -> None:
    """Without a number of rounds it goes on until then, and ends without a traceback."""
    command = [sys.executable, "-c", COMMAND_LINE, "load", str(server.client.base_url), "--pause", "0.01"]
    before = lookups(server)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for("a request", lambda: lookups(server) > before, 30.0)
            process.send_signal(signal.SIGINT)
            _, rest = process.communicate(timeout=30)
        finally:
            process.kill()

    assert process.returncode == 130
    assert "Traceback" not in rest


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nowhere", "http://127.0.0.1:port", "ftp://127.0.0.1"])
def test_no_server_is_one_line(url: str) -> None:
    """An address at which nothing answers is said."""
    with pytest.raises(OptionError, match="can't reach ") as refused:
        load.run(url, pause=0.0, rounds=1)

    assert len(str(refused.value).splitlines()) == 1


def test_a_server_that_refuses_is_said(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the server answered, from amid the workers, too."""
    monkeypatch.setattr(load, "SESSIONS", SESSIONS | {"agents": 60})
    monkeypatch.setattr("mamba_checkpoint_cache.serving.demo.REPLY_TOKENS", 10**6)

    with pytest.raises(OptionError, match="the server answered /generate with 400: "):
        load.run(str(server.client.base_url), pause=0.0, rounds=1)


def test_another_service_is_no_server() -> None:
    """Something else that listens there is said, too."""
    with http_receiver() as other, pytest.raises(OptionError, match="the server answered /v1/models with 501"):
        load.run(other.url, pause=0.0, rounds=1)


def test_a_connection_that_breaks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset comes without words of its own: the message says at least what kind of failure it was."""
    monkeypatch.setattr(load, "SESSIONS", SESSIONS)

    def reset_each(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connection.recv(65536)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=reset_each, args=(listener,), daemon=True).start()
        with pytest.raises(OptionError, match=r"can't reach http://127\.0\.0\.1:\d+: \w+"):
            load.run(f"http://127.0.0.1:{listener.getsockname()[1]}", pause=0.0, rounds=1)
        listener.shutdown(socket.SHUT_RDWR)
