"""The server's life: start, trouble, drain, end."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from hash_model import expected, hash_engine
from hash_server import FORBIDDEN
from prometheus_client import CollectorRegistry
from serving_side import ServerProcess

from mamba_checkpoint_cache.serving.engine_thread import EngineThread
from mamba_checkpoint_cache.serving.http.app import build_app
from mamba_checkpoint_cache.serving.http.service import Service
from mamba_checkpoint_cache.serving.server import CLOSE_SECONDS, GRACE_SECONDS, _bound_socket

CODE = Path(__file__).with_name("hash_server.py").read_text(encoding="utf-8")


def hash_server(step_seconds: float, grace_seconds: float = GRACE_SECONDS) -> ServerProcess:
    return ServerProcess(str(step_seconds), "0", str(grace_seconds), code=CODE)


@pytest.fixture(scope="module")
def slow() -> Iterator[ServerProcess]:
    with hash_server(0.01) as server:
        server.wait_until_listening()
        yield server


def ask(client: httpx.Client, prompt: list[int], count: int) -> httpx.Response:
    return client.post("/generate", json={"input_ids": prompt, "sampling_params": {"max_new_tokens": count, "ignore_eos": True}})


def hang_up_after(seconds: float, client: httpx.Client, body: dict[str, Any]) -> None:
    begin = time.monotonic()
    with suppress(httpx.ReadTimeout), client.stream("POST", "/generate", json=body) as response:
        for _ in response.iter_raw():
            if time.monotonic() - begin > seconds:
                return


def active_free(client: httpx.Client) -> int:
    series = 'mamba_checkpoint_slots{cache="default",pool="active",state="free"} '
    return int(float(next(line for line in client.get("/metrics").text.splitlines() if line.startswith(series)).split()[-1]))


def until_cut_off(client: httpx.Client) -> None:
    with suppress(httpx.HTTPError):
        ask(client, [1], 1500)


def wait_for(condition, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_a_failing_step_is_a_500_and_the_server_goes_on(slow: ServerProcess) -> None:
    """The request that failed is told so; the next one is served, and nothing is held."""
    failed, fine = ask(slow.client, [1, FORBIDDEN, 2], 3), ask(slow.client, [1, 2], 3)

    assert (failed.status_code, failed.json()["error"]["type"]) == (500, "server_error")
    assert "ArithmeticError" in failed.json()["error"]["message"]
    assert (fine.status_code, fine.json()["output_ids"]) == (200, expected([1, 2], 3))
    assert active_free(slow.client) == 2


def test_a_failing_prompt_fails_its_whole_call(slow: ServerProcess) -> None:
    """Of a list of prompts, one that fails fails the call, and the others are let go of."""
    response = ask(slow.client, [[1] * 50, [FORBIDDEN]], 500)

    assert response.status_code == 500
    assert wait_for(lambda: active_free(slow.client) == 2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wait_seconds", [0.01, 0.3])
def test_a_client_that_hangs_up_frees_what_it_held(slow: ServerProcess, stream: bool, wait_seconds: float) -> None:
    """A request whose client is gone is aborted, before its first token or after."""
    body = {"input_ids": [3, 4, 5], "sampling_params": {"max_new_tokens": 1500}, "stream": stream}
    with httpx.Client(base_url=slow.client.base_url, trust_env=False, timeout=wait_seconds) as client:
        hang_up_after(wait_seconds, client, body)

    assert wait_for(lambda: active_free(slow.client) == 2)


def test_a_full_queue_is_a_503(slow: ServerProcess) -> None:
    """Beyond what may wait a call is refused at once, with a hint when to come back; what waited is served."""
    with ThreadPoolExecutor(20) as pool:
        responses = list(pool.map(lambda n: ask(slow.client, [n], 30), range(20)))

    refused = [response for response in responses if response.status_code == 503]
    assert len(refused) + sum(response.status_code == 200 for response in responses) == 20
    assert 0 < len(refused) <= 20 - 6  # as many may wait; all twenty may come before the next step lets anybody in
    assert {response.headers["retry-after"] for response in refused} == {"2"}


def test_a_scrape_does_not_wait_for_the_engine() -> None:
    """/metrics and /health answer while a step is running."""
    with hash_server(0.7) as server:
        server.wait_until_listening()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(ask, server.client, [1], 2)
            time.sleep(0.2)
            begin = time.monotonic()
            assert (server.client.get("/metrics").status_code, server.client.get("/health").status_code) == (200, 200)
            assert time.monotonic() - begin < 0.4
            assert not answer.done()
            assert answer.result().status_code == 200


def test_faults_31_a_slow_scrape_holds_up_nobody() -> None:
    """faults.md 31: while a scrape takes its time, health checks are answered."""

    class SlowCollector:
        def collect(self):
            time.sleep(0.5)
            return []

    registry = CollectorRegistry()
    registry.register(SlowCollector())
    app = build_app(Service(EngineThread(hash_engine), registry, created=0))

    async def both() -> bool:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            scrape = asyncio.create_task(client.get("/metrics"))
            await asyncio.sleep(0.1)
            assert (await client.get("/health")).status_code == 503
            answered_first = not scrape.done()
            assert (await scrape).status_code == 200
            return answered_first

    assert asyncio.run(both())


def test_it_says_that_it_is_starting() -> None:
    """While the engine is built the server answers already: 503; a signal then ends it cleanly."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = CODE.replace("port=0", f"port={port}")
    with (
        ServerProcess("0", "60", "1", code=code) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
    ):

        def statuses() -> list[int]:
            try:
                return [client.get("/health").status_code, ask(client, [1], 1).status_code, client.get("/metrics").status_code]
            except httpx.ConnectError:
                return []

        assert wait_for(lambda: statuses() == [503, 503, 200], 30)
        server.signal(signal.SIGTERM)
        assert server.wait(8) == 0


def test_sigterm_finishes_what_runs_and_refuses_the_rest() -> None:
    """Running requests are served to their end, waiting and new ones get 503, and the process ends with 0 and its figures."""
    with hash_server(0.01) as server, ThreadPoolExecutor(5) as pool:
        server.wait_until_listening()
        running: list[Future[httpx.Response]] = [pool.submit(ask, server.client, [n], 60) for n in (1, 2)]
        assert wait_for(lambda: active_free(server.client) == 0)
        waiting = [pool.submit(ask, server.client, [n], 60) for n in (3, 4)]
        time.sleep(0.2)

        server.signal(signal.SIGTERM)
        assert all(future.result().status_code == 503 for future in waiting)
        new, health = ask(server.client, [5], 1), server.client.get("/health")

        assert (new.status_code, health.status_code, health.json()) == (503, 503, {"status": "draining"})
        assert [future.result().json()["output_ids"] for future in running] == [expected([n], 60) for n in (1, 2)]
        assert server.wait(5) == 0
        assert "'requests': 2" in server.process.stdout.read()


def test_sigterm_ends_in_time_whatever_runs() -> None:
    """Requests that would take minutes are refused when the grace is over, and the exit is still clean."""
    assert GRACE_SECONDS + 3 * CLOSE_SECONDS < 10
    with hash_server(0.2, grace_seconds=1.0) as server, ThreadPoolExecutor(2) as pool:
        server.wait_until_listening()
        endless = pool.submit(ask, server.client, [1], 1500)
        assert wait_for(lambda: active_free(server.client) == 1)
        begin = time.monotonic()

        server.signal(signal.SIGTERM)

        assert server.wait(5) == 0
        assert time.monotonic() - begin > 1
        assert (endless.result().status_code, endless.result().json()["error"]["message"]) == (503, "the server is shutting down")


def test_a_second_signal_ends_it_at_once() -> None:
    """Who asks twice does not wait."""
    with hash_server(0.2) as server:
        server.wait_until_listening()
        threading.Thread(target=until_cut_off, args=(server.client,), daemon=True).start()
        assert wait_for(lambda: active_free(server.client) == 1)

        server.signal(signal.SIGINT)
        assert wait_for(lambda: "draining" in "".join(server.stderr))
        server.signal(signal.SIGINT)

        assert server.wait(2) == 128 + signal.SIGINT


def test_responses_are_not_held_back() -> None:
    """Connections have Nagle's algorithm off, which waits 40 ms for the rest of what comes in two parts, as responses do."""

    async def nodelay() -> int:
        options = asyncio.get_running_loop().create_future()

        def connected(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            options.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = _bound_socket("127.0.0.1", 0)
        async with await asyncio.start_server(connected, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            writer.close()
            return await options

    assert asyncio.run(nodelay()) == 1


def test_an_address_in_use_is_one_clear_line() -> None:
    """It ends with 2 before anything is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as taken, ServerProcess("serve", "--port", str(taken.getsockname()[1])) as server:
        assert server.wait(30) == 2
        assert [f"can't listen on 127.0.0.1 port {taken.getsockname()[1]}" in line for line in server.stderr] == [True]
