"""The demo end to end on a small workload, its figures, and what it leaves behind: nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from serving_side import COMMAND_LINE

from mamba_checkpoint_cache.codec import BASELINE
from mamba_checkpoint_cache.serving import demo
from mamba_checkpoint_cache.serving.options import OptionError, ServeOptions
from mamba_checkpoint_cache.serving.workload import generate_workload
from mamba_checkpoint_cache.tables import demo_table

WORKLOAD = generate_workload(chats=3, agents=1, forks=1, resends=1, seed=5)
MIN_INT8_ERROR, MAX_INT8_ERROR = 0.001, 0.03


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition, seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise TimeoutError


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return demo.run(ServeOptions(checkpoint_slots=14), WORKLOAD)


def test_the_result_has_the_public_keys(result: dict[str, Any]) -> None:
    """The keys that others rely on, JSON all through, and a table that says what the model is."""
    tokens = {"prompt_tokens", "reused_tokens", "lost_tokens"}
    others = {"checkpoints", "evictions", "bytes", "relative_error", "drift", "latency_ms", "equal_memory"}
    assert result.keys() == {"model", "codec", "requests"} | tokens | others
    assert result["checkpoints"].keys() == {"stored", "duplicate", "skipped"}
    assert result["bytes"].keys() == {"occupied", "native_equivalent", "saved"}
    assert result["latency_ms"].keys() == {"hit_p50", "miss_p50"}
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert "gdn-hybrid" in demo_table(result)


def test_the_figures_agree_with_the_workload(result: dict[str, Any]) -> None:
    """Every turn was a request, every prompt token was looked up, and what was reused is part of them."""
    bytes_sent = sum(
        sum(len(text) for text in (session.opening, *session.turns[: turn + 1])) + turn * demo.REPLY_TOKENS
        for session in WORKLOAD.sessions
        for turn in range(len(session.turns))
    )

    assert result["requests"] == len(WORKLOAD.order)
    assert result["prompt_tokens"] == bytes_sent
    assert 0 < result["reused_tokens"] < bytes_sent
    assert result["checkpoints"]["stored"] > result["evictions"]["forced"] > 0
    assert sum(result["checkpoints"]["skipped"].values()) == 0
    assert result["bytes"]["saved"] == result["bytes"]["native_equivalent"] - result["bytes"]["occupied"] > 0
    assert result["latency_ms"]["hit_p50"] > 0
    assert result["latency_ms"]["miss_p50"] > 0


def test_the_error_is_that_of_int8(result: dict[str, Any]) -> None:
    """Percentiles in order, in the range of an eight-bit format, and said to come from a histogram."""
    error = result["relative_error"]

    assert MIN_INT8_ERROR < error["p50"] <= error["p95"] <= error["max"] < MAX_INT8_ERROR
    assert "upper bound" in error["source"]


def test_drift_is_observed(result: dict[str, Any]) -> None:
    """Some hits were recomputed: int8 moves the logits, by little, and next to no choices."""
    drift = result["drift"]

    assert drift["checks"]["ok"] > 0 == drift["checks"]["failed"]
    assert drift["tokens"] >= drift["checks"]["ok"]
    assert 0 < drift["kl_mean_nats"] < 0.05
    assert 0.9 < drift["top1"] <= 1


def test_the_codecs_are_compared_at_equal_bytes(result: dict[str, Any]) -> None:
    """Compressed, more slots than of fp32 lie in the same bytes, and more is reused; the default takes no more than int8."""
    native, int8, stored = (result["equal_memory"][codec] for codec in ("none", "int8", result["codec"]))

    assert stored["slots"] == 14 >= int8["slots"]
    assert 2.5 < (stored["slots"] + 1) / (native["slots"] + 1) < 3.5
    assert native["reuse_ratio"] < stored["reuse_ratio"] == result["reused_tokens"] / result["prompt_tokens"]


def test_no_server_is_left(result: dict[str, Any]) -> None:
    """Both servers are gone when the demo returns."""
    assert result
    assert children(os.getpid()) == []


def test_an_option_that_the_server_refuses_is_one_line(tmp_path: Path) -> None:
    """The server's own complaint, without its prefix."""
    with pytest.raises(OptionError, match=r"^can't load a model from .*: ") as refused:
        demo.run(ServeOptions(model=str(tmp_path)), WORKLOAD)

    assert len(str(refused.value).splitlines()) == 1
    assert children(os.getpid()) == []


def test_a_server_that_dies_without_a_word_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even then there is one line, with the exit code."""
    monkeypatch.setattr(demo, "_SERVE", "raise SystemExit(7)")

    with pytest.raises(OptionError, match="the server ended with 7 before it was ready"):
        demo.run(ServeOptions(), WORKLOAD)


def test_a_server_that_will_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ignores SIGTERM gets its time, and then SIGKILL."""
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    monkeypatch.setattr(demo, "_SERVE", f"{ignore}; print('at http://x', flush=True); [time.sleep(9) for _ in iter(int, 1)]")
    monkeypatch.setattr(demo, "STOP_SECONDS", 0.2)

    with demo._server(ServeOptions()) as url:
        (server,) = children(os.getpid())

    assert url == "http://x"
    assert not alive(server)


def test_options_reach_the_server() -> None:
    """Each option that is set becomes an argument of ``serve``; those that are not are left out."""
    options = ServeOptions(codec="none", checkpoint_memory_bytes=12345, chunk=32, port=0)

    arguments = demo._arguments(options)
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))

    assert given == {
        "--model": "gdn-hybrid",
        "--codec": "none",
        "--checkpoint-memory": "12345",
        "--active-slots": "8",
        "--page-size": "1",
        "--chunk": "32",
        "--host": "127.0.0.1",
        "--port": "0",
        "--drift-rate": "0.01",
        "--drift-checks-per-minute": "6",
        "--guard": "native",
        "--max-relative-error": "0.05",
        "--max-kl": "0.1",
        "--otlp-ratio": "0.1",
    }


def interrupted(number: signal.Signals, until: str) -> tuple[int, str, list[int]]:
    """Run the demo, signal it once ``until`` stands on its stderr; its exit code, its stderr and the servers it had."""
    each_request = "import mamba_checkpoint_cache.serving.progress as shown; shown.SECONDS_BETWEEN_LINES = 0; "
    command = [sys.executable, "-c", each_request + COMMAND_LINE, "demo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        seen = ""
        while until not in seen:
            line = process.stderr.readline()
            assert line, f"it has ended: {seen}"
            seen += line
        servers = wait_for(lambda: children(process.pid), 20)
        process.send_signal(number)
        _, rest = process.communicate(timeout=60)
        return process.returncode, seen + rest, servers


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_amid_the_start_of_a_process_leaves_nothing(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes when the server runs already, but its handle is not there yet, stops it all the same."""
    started = subprocess.Popen
    servers: list[int] = []

    def interrupted_start(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        process = started(*arguments, **options)
        servers.append(process.pid)
        signal.raise_signal(number)
        return process

    monkeypatch.setattr(subprocess, "Popen", interrupted_start)

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        demo.run(ServeOptions(), WORKLOAD)

    assert len(servers) == 1
    assert not any(map(alive, servers))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_at_the_start_leaves_nothing(number: signal.Signals, code: int) -> None:
    """Ctrl-C while the server starts ends both, without a traceback."""
    returned, printed, servers = interrupted(number, "starting the server")

    assert returned == code
    assert "Traceback" not in printed
    assert not any(map(alive, servers))


@pytest.mark.slow
def test_ctrl_c_amid_requests_leaves_nothing() -> None:
    """Nor does it while requests are under way, to the last of the servers that it compares."""
    returned, printed, servers = interrupted(signal.SIGINT, f"requests, codec {BASELINE}: 20")

    assert returned == 130
    assert "Traceback" not in printed
    assert not any(map(alive, servers))


@pytest.mark.slow
def test_int8_reuses_much_more_on_the_whole_workload(tmp_path: Path) -> None:
    """As ``make demo`` runs it: native states thrash in a pool in which int8 keeps more than half of the tokens reusable."""
    target = tmp_path / "demo.json"
    subprocess.run([sys.executable, "-c", COMMAND_LINE, "demo", "--json", str(target)], check=True, timeout=600)

    equal = json.loads(target.read_text())["equal_memory"]
    assert equal["int8"]["reuse_ratio"] > 0.5
    assert equal["int8"]["reuse_ratio"] > 1.25 * equal["none"]["reuse_ratio"]
