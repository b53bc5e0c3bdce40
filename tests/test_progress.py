"""What is shown of something long."""

from __future__ import annotations

import pytest

from mamba_checkpoint_cache.serving import progress as module
from mamba_checkpoint_cache.serving.progress import progress


def test_lines_come_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal a line is printed once the interval is over, not at every step, and nothing on stdout."""
    now = iter([0.0, 1.0, 5.5, 5.6, 6.0, 12.0, 12.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))

    with progress("steps", 2000) as advance:
        for _ in range(4):
            advance(500)

    printed = capsys.readouterr()
    assert printed.err.splitlines() == ["steps: 1,000 of 2,000", "steps: 2,000 of 2,000"]
    assert printed.out == ""


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a terminal the bar shows title and count, on stderr."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(module.sys.stderr, "isatty", lambda: True, raising=False)

    with progress("steps", 10) as advance:
        advance(4)

    printed = capsys.readouterr()
    assert "steps" in printed.err
    assert "4/10" in printed.err
    assert printed.out == ""
