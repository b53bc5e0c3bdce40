"""How far something long has come: a bar on a terminal, a line now and then elsewhere; always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

SECONDS_BETWEEN_LINES = 5.0

Advance = Callable[[int], None]


@contextmanager
def progress(title: str, total: int) -> Iterator[Advance]:
    """Gives a function to call with the number of steps just done; ``total`` steps in all."""
    shown = _bar if sys.stderr.isatty() and find_spec("rich") else _lines
    with shown(title, total) as advance:
        yield advance


@contextmanager
def _bar(title: str, total: int) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda steps: bar.advance(task, steps)


@contextmanager
def _lines(title: str, total: int) -> Iterator[Advance]:
    done, due = 0, time.monotonic() + SECONDS_BETWEEN_LINES

    def advance(steps: int) -> None:
        nonlocal done, due
        done += steps
        if time.monotonic() >= due:
            due = time.monotonic() + SECONDS_BETWEEN_LINES
            sys.stderr.write(f"{title}: {done:,} of {total:,}\n")

    yield advance
