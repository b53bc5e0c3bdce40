"""A process that forks after it has built a cache (fault 34)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
PATH = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])


def run(*arguments: str) -> None:
    """A :mod:`fork_side`, which says itself what is wrong."""
    environment = {**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TESTS / "fork_side.py"), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_child_neither_hangs_nor_counts_what_its_parent_did() -> None:
    """Forked while threads scrape and an operation is open, a child counts from 0, can use the cache and build another."""
    run("counts")


def test_spans_are_exported_once_by_the_process_that_made_them(tmp_path: Path) -> None:
    """With a batching exporter, parent and child each hand over their own spans, whether made before or after the fork."""
    run("spans", str(tmp_path / "spans"))

    depths = sorted(map(int, (tmp_path / "spans").read_text().split()))
    assert depths == [1, 2, 3, 10, 11, 12]
