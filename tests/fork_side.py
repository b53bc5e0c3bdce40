"""Processes that fork with a cache in them, ``fork_side.py counts`` and ``fork_side.py spans FILE``; they say what is wrong."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import torch
from cache_play import build
from engine_side import serve
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from mamba_checkpoint_cache import Telemetry

FORKS = 25


def value(telemetry: Telemetry, name: str, **labels: str) -> float:
    return next(
        sample.value
        for family in telemetry._metrics.collect()
        for sample in family.samples
        if sample.name == f"mamba_checkpoint_{name}" and sample.labels == {"cache": "default", **labels}
    )


def in_child(work) -> None:
    """Run in a child that has five seconds; it must end well."""
    child = os.fork()
    if child == 0:
        signal.alarm(5)
        try:
            work()
            os._exit(0)
        except BaseException as error:  # noqa: BLE001 - the parent is told
            sys.stderr.write(repr(error))
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        sys.exit(f"a child ended with {code}")


def counts() -> None:
    """Forks while other threads scrape, and while an operation is open: children begin at 0, and the parent goes on."""
    telemetry = Telemetry()
    cache = build(telemetry)
    serve(cache, [1, 2, 3], 2)
    stop = threading.Event()

    def scrape() -> None:
        while not stop.is_set():
            list(telemetry._metrics.collect())
            Telemetry(threading.current_thread().name, registry=telemetry.registry).close()

    threads = [threading.Thread(target=scrape) for _ in range(3)]
    for thread in threads:
        thread.start()

    def child() -> None:
        noted = value(telemetry, "slot_frees_total", pool="active", reason="aborted")
        if value(telemetry, "lookups_total", outcome="miss") != 0 or noted != 0:
            raise ValueError("a child has its parent's counts")
        serve(cache, [1, 2, 3], 2)
        found = [value(telemetry, "lookups_total", outcome=outcome) for outcome in ("hit", "miss")]
        if found != [1, 0] or value(telemetry, "operation_seconds_count", operation="match") != 1:
            raise ValueError(f"a child counted {found}")
        Telemetry("of the child").close()

    for _ in range(FORKS):
        with telemetry.operation("commit"):
            telemetry.freed("active", "aborted")  # noted, and as a rule not yet settled when the child starts
            in_child(child)
    stop.set()
    for thread in threads:
        thread.join()
    if value(telemetry, "lookups_total", outcome="miss") != 1 or value(telemetry, "telemetry_errors_total") != 0:
        sys.exit("the parent lost count")


class FileExporter(SpanExporter):
    def __init__(self, path: Path) -> None:
        self.path = path

    def export(self, spans) -> SpanExportResult:
        with self.path.open("a") as file:
            file.writelines(f"{span.attributes['mamba_checkpoint.depth']}\n" for span in spans)
        return SpanExportResult.SUCCESS


def spans(path: Path) -> None:
    """Spans of before the fork, of the child and of after: each is to be exported once, by the process that made it."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(FileExporter(path), schedule_delay_millis=60_000))
    telemetry = Telemetry(tracer_provider=provider)

    def record(*depths: int) -> None:
        for depth in depths:
            with telemetry.operation("match") as operation:
                operation.set(depth=depth)

    def child() -> None:
        record(10, 11, 12)
        provider.shutdown()

    record(1, 2)
    in_child(child)
    record(3)
    provider.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    counts() if sys.argv[1] == "counts" else spans(Path(sys.argv[2]))
