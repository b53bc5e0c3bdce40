"""A request: a prompt, and the output as it grows."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Literal

from mamba_checkpoint_cache.serving.sampling import GREEDY, Sampling

_serials = itertools.count()
_process = uuid.uuid4().hex[:12]


@dataclass(frozen=True, slots=True)
class Finish:
    """How a request ended. ``matched``: the token or the text it stopped at. ``status`` and ``message``: what went wrong."""

    reason: Literal["stop", "length", "abort", "error"]
    matched: int | str | None = None
    status: HTTPStatus = HTTPStatus.OK
    message: str = ""


ABORTED = Finish("abort")


def unavailable(message: str) -> Finish:
    """The end of a request that the server can't serve now."""
    return Finish("error", status=HTTPStatus.SERVICE_UNAVAILABLE, message=message)


@dataclass(slots=True, eq=False)
class Request:
    """What is asked of the engine, and what has come of it so far.

    The engine's thread alone writes to it, and calls ``notify`` after each change. ``output`` only grows; it is complete once
    ``finish`` is set. ``cached_tokens`` is the part of the prompt that was not computed again.
    """

    tokens: list[int]
    sampling: Sampling = GREEDY
    notify: Callable[[], None] = lambda: None
    id: str = field(default_factory=lambda: f"{_process}-{next(_serials)}")
    output: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    finish: Finish | None = None

    def end(self, finish: Finish) -> None:
        """Record how it ended, once."""
        if self.finish is None:
            self.finish = finish
            self.notify()
