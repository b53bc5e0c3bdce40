"""A call's requests on the engine's thread, awaited on the event loop's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Self, TypeVar

from starlette.requests import Request as HttpRequest

from mamba_checkpoint_cache.serving.engine_thread import EngineThread
from mamba_checkpoint_cache.serving.http.errors import bad_request, of_finish
from mamba_checkpoint_cache.serving.http.service import Service
from mamba_checkpoint_cache.serving.logprobs import WantedLogprobs
from mamba_checkpoint_cache.serving.request import Request
from mamba_checkpoint_cache.serving.sampling import Sampling
from mamba_checkpoint_cache.serving.tokens import Tokens

T = TypeVar("T")

REPLACEMENT = "\ufffd"


class Generation:
    """The requests of one call: handed to the engine on entry, and aborted on exit if they have not ended by then."""

    def __init__(
        self, service: Service, prompts: Sequence[list[int]], sampling: Sampling, logprobs: WantedLogprobs | None = None
    ) -> None:
        engine = service.engine()
        try:
            for prompt in prompts:
                engine.check_request(prompt, sampling, logprobs)
        except ValueError as error:
            raise bad_request(str(error)) from None
        self._thread: EngineThread = service.thread
        self._changed = asyncio.Event()
        notify = partial(_wake, asyncio.get_running_loop(), self._changed.set)
        self.requests = [Request(prompt, sampling, notify, logprobs) for prompt in prompts]

    async def __aenter__(self) -> Self:
        for request in self.requests:
            self._thread.submit(request)
        return self

    async def __aexit__(self, *_error: object) -> None:
        for request in self.requests:
            if request.finish is None:
                self._thread.abort(request)

    async def changes(self) -> AsyncIterator[None]:
        """Comes back whenever a request has new tokens or has ended, until all have; changes in between are taken together.

        Raises:
            ApiError: if one of them failed or was refused.
        """
        done = False
        while not done:
            await self._changed.wait()
            self._changed.clear()
            finishes = [request.finish for request in self.requests]
            for finish in finishes:
                if finish is not None and finish.reason == "error":
                    raise of_finish(finish)
            done = None not in finishes
            yield

    async def finished(self) -> list[Request]:
        """The requests, once all have ended."""
        async for _ in self.changes():
            pass
        return self.requests


def text_of(request: Request, tokens: Tokens) -> str:
    """The output as text, up to the stop text that ended it. While it still grows, less what may yet change or come to be cut."""
    finish, text = request.finish, tokens.decode(request.output)
    if finish is not None:
        return text[: text.index(finish.matched)] if isinstance(finish.matched, str) and finish.matched in text else text
    unsure = max((len(stop) - 1 for stop in request.sampling.stop_texts), default=0)
    return text[: len(text) - unsure].rstrip(REPLACEMENT)


async def unless_disconnected(request: HttpRequest, work: Awaitable[T]) -> T | None:
    """The result of ``work``; None if the client hangs up first, which cancels it."""
    worker, watcher = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        return worker.result() if worker.done() else None
    finally:
        for task in (worker, watcher):
            task.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)  # the caller may close what the worker has just left


async def _disconnected(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _wake(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the loop has closed: nobody waits any more
        loop.call_soon_threadsafe(function)
