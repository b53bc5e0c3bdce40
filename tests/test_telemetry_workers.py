"""Several worker processes scraped as one, through prometheus_client's multiprocess mode (fault 30)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from cache_play import build, play
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from telemetry_worker import TURNS, digest
from test_telemetry_exposition import GOLDEN

from mamba_checkpoint_cache.serving.scrape import Scrape

TESTS = Path(__file__).parent
PATH = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])


class WorkerProcess:
    """A :mod:`telemetry_worker`; attributes are what it can be told."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        environment = {**os.environ, "PYTHONPATH": PATH, "PROMETHEUS_MULTIPROC_DIR": str(directory), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(TESTS / "telemetry_worker.py"), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __getattr__(self, command: str) -> Callable[[], object]:
        def ask() -> object:
            self.process.stdin.write(f"{command}\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
            assert line, f"the worker has ended with {self.process.wait(5)}"
            return json.loads(line)

        return ask

    def end(self) -> int:
        self.process.stdin.close()
        code = self.process.wait(5)
        self.process.stdout.close()
        return code


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., WorkerProcess]]:
    """Starts workers that share a directory; they are gone afterwards."""
    with ExitStack() as stack:

        def start(*arguments: str, directory: Path = tmp_path) -> WorkerProcess:
            worker = WorkerProcess(directory, *arguments)
            stack.callback(lambda: worker.process.stdin.closed or worker.end())
            stack.callback(worker.process.kill)
            return worker

        yield start


def merged(directory: Path) -> Scrape:
    return Scrape(exposition(directory))


def exposition(directory: Path) -> str:
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(directory))
    return generate_latest(registry).decode()


def slots(directory: Path) -> dict[str, int]:
    return merged(directory).by("slots", "state", pool="checkpoint")


def test_the_numbers_of_workers_add_up(start: Callable[..., WorkerProcess], tmp_path: Path) -> None:
    """Counters and histograms of three workers are three times those of one, and gauges are the pools of all that live."""
    workers = [start() for _ in range(3)]
    for worker in workers:
        assert worker.play() == digest(play(build(None), TURNS))
    scrape = merged(tmp_path)

    assert scrape.by("lookups_total", "outcome") == {"hit": 3 * 2, "miss": 3}
    assert scrape.by("tokens_total", "kind") == {"prompt": 36, "reused": 3 * (2 + 2), "lost": 3 * (1 + 1)}
    assert scrape.value("operation_seconds_count", operation="match") == 9
    assert scrape.value("relative_error_count", scope="state") == scrape.value("compressions_total", outcome="stored")
    assert scrape.by("slots", "state", pool="checkpoint") == {"free": 3, "reserved": 0, "evictable": 6, "locked": 0}
    assert scrape.value("slot_capacity", pool="checkpoint") == 9
    assert scrape.value("info", codec="int8") == 1
    assert scrape.by("guard_mode", "mode") == {"normal": 1, "native": 0, "stopped": 0}
    assert scrape.value("drift_budget", kind="relative_error") == 0.05
    assert scrape.value("telemetry_errors_total") == 0

    names = {line.split()[0] for line in GOLDEN.read_text().splitlines()}
    types = [line.split() for line in exposition(tmp_path).splitlines() if line.startswith("# TYPE")]
    assert {name for _, _, name, _ in types} == names
    assert 'pid="' not in exposition(tmp_path)


def test_the_files_follow_each_call_of_a_worker(start: Callable[..., WorkerProcess], tmp_path: Path) -> None:
    """What another process reads is what the pools are and what was counted after the last call, operation or not."""
    worker = start()
    worker.play()

    worker.hold()
    assert slots(tmp_path) == {"free": 1, "reserved": 0, "evictable": 1, "locked": 1}
    worker.release()
    assert slots(tmp_path) == {"free": 1, "reserved": 0, "evictable": 2, "locked": 0}
    worker.run()
    assert merged(tmp_path).by("slots", "state", pool="active") == {"free": 3, "reserved": 0, "evictable": 0, "locked": 1}
    stored = merged(tmp_path).value("commits_total", outcome="stored")
    worker.commit()
    assert merged(tmp_path).value("commits_total", outcome="stored") == stored + 1
    released = merged(tmp_path).value("slot_frees_total", pool="active", reason="released")
    worker.drop()
    assert merged(tmp_path).value("slot_frees_total", pool="active", reason="released") == released + 1
    worker.flush()
    assert slots(tmp_path) == {"free": 3, "reserved": 0, "evictable": 0, "locked": 0}
    assert merged(tmp_path).value("bytes", pool="checkpoint", kind="occupied") == 0


def test_workers_come_and_go(start: Callable[..., WorkerProcess], tmp_path: Path) -> None:
    """The gauges of one that was killed go once it is marked dead, those of a closed cache at once; what they counted stays."""
    killed, closed, living = (start() for _ in range(3))
    for worker in (killed, closed, living):
        worker.play()

    killed.process.kill()
    killed.process.wait()
    mark_process_dead(killed.process.pid, str(tmp_path))
    assert merged(tmp_path).value("slot_capacity", pool="checkpoint") == 6
    closed.close()
    assert merged(tmp_path).value("slot_capacity", pool="checkpoint") == 3
    assert slots(tmp_path) == {"free": 1, "reserved": 0, "evictable": 2, "locked": 0}
    assert merged(tmp_path).by("lookups_total", "outcome") == {"hit": 6, "miss": 3}

    new = start()
    new.play()
    assert merged(tmp_path).value("slot_capacity", pool="checkpoint") == 6
    assert merged(tmp_path).by("lookups_total", "outcome") == {"hit": 8, "miss": 4}
    assert [worker.end() for worker in (closed, living, new)] == [0, 0, 0]


def test_a_fork_counts_once(start: Callable[..., WorkerProcess], tmp_path: Path) -> None:
    """A child of a worker adds what it does itself: the parent's counts are in no file twice."""
    worker = start()
    worker.play()

    assert worker.fork() == 0

    assert worker.local_hits() == 2
    assert merged(tmp_path).by("lookups_total", "outcome") == {"hit": 2 + 3, "miss": 1}


def test_a_directory_without_room_costs_the_files_only(start: Callable[..., WorkerProcess], tmp_path: Path) -> None:
    """A worker whose files can't be had serves the same, counts and says so, keeps numbers of its own, and ends with 0."""
    worker = start("20000")

    assert worker.play() == digest(play(build(None), TURNS))
    assert worker.errors() == 1
    assert worker.local_hits() == 2
    assert list(tmp_path.glob("*.db")) == []
    assert worker.end() == 0


def test_a_full_disk_kills_no_worker(start: Callable[..., WorkerProcess], tmp_path: Path) -> None:
    """Where a write to a mapped file would be a SIGBUS, no file is mapped; one that was mapped before has its room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a file system")
    try:
        cache = build(None)
        first, second = digest(play(cache, TURNS)), digest(play(cache, TURNS))
        early = start(directory=disk)
        assert early.play() == first
        with (disk / "filler").open("wb", buffering=0) as filler, suppress(OSError):
            while filler.write(bytes(4096)):
                pass
        late = start(directory=disk)

        assert late.play() == first
        assert early.play() == second
        early.run()
        assert (early.errors(), late.errors()) == (0, 1)
        assert merged(disk).by("lookups_total", "outcome") == {"hit": 5, "miss": 2}
        assert merged(disk).by("slots", "state", pool="active") == {"free": 3, "reserved": 0, "evictable": 0, "locked": 1}
        assert [early.end(), late.end()] == [0, 0]
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
