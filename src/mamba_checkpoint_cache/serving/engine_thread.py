"""The thread that owns the engine: model, cache and pools are built, used and dropped there, and nowhere else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from http import HTTPStatus
from queue import Empty, SimpleQueue
from typing import TypeVar

import structlog

from mamba_checkpoint_cache.serving.engine import Engine
from mamba_checkpoint_cache.serving.request import Finish, Request

T = TypeVar("T")

PAUSE_SECONDS = 0.1
"""How long to wait after a step that failed as a whole, so that a lasting fault does not fill the log."""

logger = structlog.get_logger()


class EngineThread:
    """Builds an engine with ``build`` and steps it for as long as there is work, drift checks included.

    All methods may be called from any thread.

    ``ready`` gives the engine once it is built, or what ``build`` raised.
    """

    def __init__(self, build: Callable[[], Engine]) -> None:
        self.ready: Future[Engine] = Future()
        self._build = build
        self._inbox: SimpleQueue[Callable[[Engine], object]] = SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start building."""
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Hand a request over; what becomes of it is on the request, also if it can never run."""
        self._inbox.put(lambda engine: _submit(engine, request))

    def abort(self, request: Request) -> None:
        """End a request early, if it has not ended."""
        self._inbox.put(lambda engine: engine.abort(request))

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run ``function`` between two steps."""
        future: Future[T] = Future()

        def command(engine: Engine) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(engine))
            except BaseException as error:  # noqa: BLE001 - it is the caller's, who waits in another thread
                future.set_exception(error)

        self._inbox.put(command)
        return future

    def stop(self, timeout: float) -> bool:
        """Stop after the step in progress. Whether that came about within ``timeout`` seconds."""
        self._inbox.put(self._stop)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _stop(self, _engine: Engine) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            engine = self._build()
        except BaseException as error:  # noqa: BLE001 - it is for whoever waits for the engine
            self.ready.set_exception(error)
            return
        self.ready.set_result(engine)
        while not self._stopping:
            try:
                self._obey(engine)
                engine.step()
            except Exception:
                logger.exception("step failed")
                time.sleep(PAUSE_SECONDS)

    def _obey(self, engine: Engine) -> None:
        """Do what was asked since the last step; without work, wait to be asked."""
        with suppress(Empty):
            command = self._inbox.get(block=engine.idle)
            while True:
                command(engine)
                command = self._inbox.get_nowait()


def _submit(engine: Engine, request: Request) -> None:
    try:
        engine.submit(request)
    except ValueError as error:
        request.end(Finish("error", status=HTTPStatus.BAD_REQUEST, message=str(error)))
