"""Where telemetry stops its own failures, so that none reaches the cache."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType


class Containment:
    """A block to run telemetry in, ``with contained: …``: an exception in it goes to ``on_error`` and no further.

    May be entered again while it is entered. An interrupt is no failure of telemetry and passes through.
    """

    __slots__ = ("on_error",)

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self.on_error = on_error

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        if isinstance(error, Exception):
            self.on_error(error)
            return True
        return False
