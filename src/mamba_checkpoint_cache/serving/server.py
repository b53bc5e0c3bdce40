"""The server's life: bind, build the engine, serve, drain."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import structlog
import uvicorn
from opentelemetry.trace import TracerProvider
from prometheus_client import CollectorRegistry

from mamba_checkpoint_cache.serving.engine import Engine
from mamba_checkpoint_cache.serving.engine_thread import EngineThread
from mamba_checkpoint_cache.serving.http.app import build_app
from mamba_checkpoint_cache.serving.http.service import Service
from mamba_checkpoint_cache.serving.options import OptionError, ServeOptions
from mamba_checkpoint_cache.serving.spans import exported_spans

GRACE_SECONDS = 6.0
"""How long running requests may go on after the first signal; what is left then is refused."""
CLOSE_SECONDS = 1
POLL_SECONDS = 0.05
BACKLOG = 1024
GOING_DOWN = "the server is shutting down"

logger = structlog.get_logger()


def main(options: ServeOptions) -> dict[str, Any]:
    """Serve until SIGTERM or SIGINT, then finish what runs and refuse the rest; a second signal ends the process at once.

    Prints ``listening on http://HOST:PORT`` to stdout when it takes requests; all else goes to stderr. Returns what it did,
    as the one row of a table.

    Raises:
        OptionError: if the address is not to be had, or the model can't be loaded or served.
    """
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    with _bound_socket(options.host, options.port) as listener, exported_spans(options) as tracer_provider:
        engine = asyncio.run(_serve(options, listener, tracer_provider))
    done = ("requests", "prompt_tokens", "cached_tokens", "output_tokens", "stop", "length", "abort", "error")
    return {"rows": [{name: engine.counts[name] if engine else 0 for name in done}]}


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handling: it would end the process by the signal, and this server ends with 0."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(options: ServeOptions, listener: socket.socket, tracer_provider: TracerProvider | None) -> Engine | None:
    """All of it, from the first ``/health`` (503, as the engine is being built) to the last response."""
    registry = CollectorRegistry()
    build = "mamba_checkpoint_cache.serving.build"  # imports for seconds, which the engine's thread can do
    thread = EngineThread(lambda: import_module(build).build_engine(options, registry, tracer_provider))
    service = Service(thread, registry, created=int(time.time()))
    config = uvicorn.Config(
        build_app(service), log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=CLOSE_SECONDS
    )
    server = _Uvicorn(config)
    stop = _stop_on_signals()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    thread.start()
    try:
        ready = asyncio.wrap_future(thread.ready)
        await asyncio.wait((ready, stop), return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            return None
        engine = ready.result()
        sys.stdout.write(f"listening on {_url(listener)}\n")
        sys.stdout.flush()
        await stop
        service.draining = True
        await _drain(thread)
        return engine
    finally:
        service.draining = True
        server.should_exit = True
        await serving
        if not thread.stop(CLOSE_SECONDS):
            os._exit(0)  # stuck in a build or a step: nothing but the end of the process ends that


def _stop_on_signals() -> asyncio.Future[None]:
    """Resolved by the first SIGTERM or SIGINT; the second ends the process."""
    loop = asyncio.get_running_loop()
    stop = loop.create_future()

    def on_signal(number: int) -> None:
        if stop.done():
            os._exit(128 + number)
        logger.info("draining", signal=signal.Signals(number).name, grace_seconds=GRACE_SECONDS)
        stop.set_result(None)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop


async def _drain(thread: EngineThread) -> None:
    """Refuse who waits, let run who runs, and refuse them too when the time is up."""
    with suppress(TimeoutError):
        async with asyncio.timeout(GRACE_SECONDS):
            while not await asyncio.wrap_future(thread.call(_refuse_waiting)):
                await asyncio.sleep(POLL_SECONDS)
    with suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_SECONDS):
            await asyncio.wrap_future(thread.call(lambda engine: engine.refuse_all(GOING_DOWN)))


def _refuse_waiting(engine: Engine) -> bool:
    engine.refuse_waiting(GOING_DOWN)
    return engine.scheduler.idle


def _bound_socket(host: str, port: int) -> socket.socket:
    # The protocol is named because asyncio turns off Nagle's algorithm only then, which costs 40 ms per response otherwise.
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except (OSError, UnicodeError) as error:
        listener.close()
        raise OptionError(f"can't listen on {host} port {port}: {error}") from error
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
