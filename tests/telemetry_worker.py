"""A worker process with a cache, which does what it is told, a line at a time, and answers each line with one of JSON."""

from __future__ import annotations

import json
import os
import sys

import structlog
import torch
from cache_play import Turn, build, play
from engine_side import Request

from mamba_checkpoint_cache import DriftGuard, Telemetry

TURNS = [Turn((1, 2, 3, 4), (2, 4), poisoned=False, end="finish", after="nothing")] * 3


def digest(results: list) -> str:
    return str([result.hex()[:64] if isinstance(result, bytes) else result for result in results])


class Worker:
    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.telemetry = Telemetry("worker")
        self.cache = build(self.telemetry, DriftGuard())
        self.held: list = []

    def play(self) -> str:
        return digest(play(self.cache, TURNS))

    def hold(self) -> None:
        self.held.append(self.cache.match_prefix([1, 2, 3, 4, 5]))

    def release(self) -> None:
        self.cache.release(self.held.pop())

    def run(self) -> None:
        self.held.append(Request(self.cache, [7, 8]))

    def commit(self) -> None:
        self.held[-1].commit(2, 1.0)

    def drop(self) -> None:
        self.cache.active.free(self.held.pop().slot)

    def flush(self) -> None:
        self.cache.flush()

    def close(self) -> None:
        self.cache.close()

    def errors(self) -> float:
        return self.telemetry._metrics.errors.value

    def local_hits(self) -> float:
        return self.telemetry.registry.get_sample_value("mamba_checkpoint_lookups_total", {"cache": "worker", "outcome": "hit"})

    def fork(self) -> int:
        """A child that plays too, and ends; its exit code."""
        child = os.fork()
        if child == 0:
            try:
                self.play()
                os._exit(0)
            except BaseException:  # noqa: BLE001 - the parent is told
                os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    worker = Worker()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(getattr(worker, line.strip())()) + "\n")
        sys.stdout.flush()
