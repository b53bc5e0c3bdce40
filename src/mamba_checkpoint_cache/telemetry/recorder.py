"""Telemetry: what the cache calls to say what happened. It never raises, never waits, and never changes what the cache does."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any, NamedTuple, Self

from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, TracerProvider
from prometheus_client import CollectorRegistry

from mamba_checkpoint_cache.telemetry import catalogue as names
from mamba_checkpoint_cache.telemetry.containment import Containment
from mamba_checkpoint_cache.telemetry.logs import Logs
from mamba_checkpoint_cache.telemetry.metrics import Metrics, PoolSnapshot, PoolsSnapshot
from mamba_checkpoint_cache.telemetry.operation import Instruments, Operation, Step, Within
from mamba_checkpoint_cache.telemetry.tracing import Scalar, Tracing

__all__ = ["NULL", "Birth", "NullTelemetry", "Operation", "PoolSnapshot", "PoolsSnapshot", "Telemetry"]


class Birth(NamedTuple):
    """When a checkpoint was stored, and the span of the commit that stored it if that was sampled."""

    time: float
    commit: SpanContext | None


class Telemetry:
    """The metrics, spans and log lines of the cache called ``cache``.

    ``registry`` receives the metrics (by default a new one, see the attribute), ``tracer_provider`` the spans (by default
    the global one, also if it is set later), ``logger`` the log lines and, at debug, an event per operation (by default
    structlog's own, and that event only once structlog is configured). ``clock`` gives seconds and never goes back.

    No method raises: what fails inside is counted in ``mamba_checkpoint_telemetry_errors_total`` and logged at most once a
    minute. A label value that the catalogue doesn't know is such a failure. Numbers may be numpy or torch scalars on the host.
    One thread records; any thread may scrape. The series last until ``close``, or as long as this object does. In a forked child
    they start from 0.

    With ``PROMETHEUS_MULTIPROC_DIR`` set when Python starts, the process is one of several workers that are scraped as one: its
    numbers are also in files there, which prometheus_client's ``MultiProcessCollector`` adds up. Build the cache in the worker,
    empty the directory before the first one starts, and call ``mark_process_dead`` for each that has ended: its gauges go, its
    counts stay. A directory without room is a failure like any other: a worker's numbers are then in its registry alone.

    Raises:
        ValueError: at construction, if ``cache`` is empty, if a live cache of that name reports to ``registry``, or if
            something else there owns one of the metrics' names.
    """

    def __init__(
        self,
        cache: str = "default",
        *,
        registry: CollectorRegistry | None = None,
        tracer_provider: TracerProvider | None = None,
        logger: Any | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not cache:
            raise ValueError("Telemetry needs a name for the cache, got an empty one")
        self.registry = CollectorRegistry() if registry is None else registry
        self._contained = Containment(self._failed)
        self._clock = clock
        self._logs = Logs(cache, logger, clock)
        self._metrics = Metrics(cache, self.registry, self._contained)
        self._tracing = Tracing(cache, tracer_provider)
        self._instruments = Instruments(self._metrics, self._tracing, self._logs, self._contained, clock)
        with self._contained:
            self._metrics.share()

    def observe_pools(self, source: Callable[[], PoolsSnapshot]) -> None:
        """Call ``source`` at every scrape, from the scraping thread, and expose what it returns as gauges."""
        self._metrics.source = source
        self._metrics.publish()

    def moved(self) -> None:
        """Slots have moved outside of any operation."""
        self._metrics.publish()

    def operation(self, name: names.OperationName) -> Operation:
        """A context manager around one operation. What its body raises passes through, and the span notes it."""
        outer = self._instruments.current
        kind = Operation if outer is None or not outer.unheard else Step
        return kind(self._instruments, name)

    def within(self, parent: Context | None) -> AbstractContextManager[object]:
        """A block whose calls belong to ``parent``, as ``opentelemetry.context.get_current()`` gave it where a request came in.

        For engines that serve the requests of many threads or tasks on one thread, on which nothing of theirs is current. With
        None, the calls belong to what is current on the thread, as they do outside. The block must not await.
        """
        return Within(self._instruments, parent)

    def lookup(self, *, prompt: int, reused: int, lost: int, miss: names.MissReason | None) -> None:
        """A prompt was looked up; all counts in tokens. ``miss`` says why no more was reused, also on a hit."""
        with self._contained:
            self._metrics.add("lookups_total", "hit" if reused > 0 else "miss")
            self._metrics.add("tokens_total", "prompt", amount=prompt)
            self._metrics.add("tokens_total", "reused", amount=reused)
            self._metrics.add("tokens_total", "lost", amount=lost)
            if miss is not None:
                self._metrics.add("misses_total", miss)

    def allocation(self, pool: names.Pool, outcome: names.AllocationOutcome) -> None:
        """One attempt to take a slot ended."""
        self._metrics.add("slot_allocations_total", pool, outcome)

    def freed(self, pool: names.Pool, reason: names.FreeReason) -> None:
        """One slot was given back."""
        self._metrics.add("slot_frees_total", pool, reason)

    def compression(self, outcome: names.CompressionOutcome, *, bytes_in: int = 0, bytes_out: int = 0) -> None:
        """One state went through the codec, or was refused."""
        self._metrics.add("compressions_total", outcome)
        self._codec_bytes(bytes_in, bytes_out)
        if outcome == "non_finite":
            with self._contained:
                self._logs.emit(names.STATE_NON_FINITE)

    def report(self, relative_error: float, worst_head: float) -> None:
        """The report of one compression has arrived: Frobenius error over norm, of the state and of its worst head."""
        self._observe("relative_error", "state", value=relative_error)
        self._observe("relative_error", "worst_head", value=worst_head)

    def restored(self, outcome: names.RestoreOutcome, hops: int, *, bytes_in: int = 0, bytes_out: int = 0) -> None:
        """One active slot was written: from a checkpoint with ``hops`` lossy round trips behind it, or zeroed."""
        with self._contained:
            self._metrics.add("restores_total", outcome)
            self._codec_bytes(bytes_in, bytes_out)
            if outcome == "restored":
                self._observe("hops", value=hops)

    def committed(self, outcome: names.CommitOutcome, reason: names.SkipReason | None = None) -> None:
        """One commit ended; ``reason`` says why it stored nothing."""
        self._metrics.add("commits_total", outcome)
        if reason is not None:
            self._metrics.add("skips_total", reason)
        if reason in names.NO_SLOT:
            with self._contained:
                self._logs.emit(names.SLOTS_EXHAUSTED, reason=reason)

    def born(self) -> object:
        """What to keep beside a checkpoint that is being stored, and to hand to ``evicted`` when it goes."""
        with self._contained:
            running = self._instruments.current
            return Birth(self._clock(), running.commit() if running is not None and running.recording else None)
        return None

    def evicted(self, reason: names.EvictionReason, reused: bool, birth: object) -> None:
        """One checkpoint was dropped. The span that runs links to the commit that stored it."""
        with self._contained:
            self._metrics.add("evictions_total", "checkpoint", reason, "yes" if reused else "no")
            if not isinstance(birth, Birth):
                return
            ended = "flushed" if reason == "flush" else "evicted"
            self._observe("residency_seconds", ended, value=self._clock() - birth.time)
            running = self._instruments.current
            if birth.commit is not None and running is not None:
                running.span.add_link(birth.commit)

    def checked(self, outcome: names.DriftOutcome, *, kl_nats: Iterable[float] = (), agreed: Iterable[bool] = ()) -> None:
        """One sampled logit check ended: by position, the KL (left out if not finite) and whether both runs agreed."""
        with self._contained:
            self._metrics.add("drift_checks_total", outcome)
            for value in kl_nats:
                if math.isfinite(value):
                    self._observe("logit_kl_nats", value=value)
            for same in agreed:
                self._metrics.add("top1_agreement_total", "yes" if same else "no")

    def check_failed(self, error: Exception) -> None:
        """A sampled logit check came to nothing because of ``error``; :meth:`checked` counts it."""
        with self._contained:
            self._logs.emit(names.CHECK_FAILED, error=repr(error))

    def guard_changed(self, to: names.GuardMode, *, cause: str, commits: int, codec: str) -> None:
        """The drift guard changed its mode, ``commits`` commits after the change before; ``codec`` is what is used from here on.

        An event on the span that is current.
        """
        with self._contained:
            self._metrics.add("guard_changes_total", to)
            fields: dict[str, Scalar] = {"mode": to, "cause": cause, "commits": commits, "codec": codec}
            self._tracing.event(names.GUARD_EVENT, fields)
            self._logs.emit(names.GUARD_RECOVERED if to == "normal" else names.GUARD_DEGRADED, **fields)

    def close(self) -> None:
        """Take the series out of the registry and let go of the pools: the name is free again. May be called twice."""
        with self._contained:
            self._metrics.close()

    def _codec_bytes(self, bytes_in: int, bytes_out: int) -> None:
        self._metrics.add("codec_bytes_total", "in", amount=bytes_in)
        self._metrics.add("codec_bytes_total", "out", amount=bytes_out)

    def _observe(self, *series: str, value: float) -> None:
        running = self._instruments.current
        self._metrics.observe(*series, value=value, exemplar=None if running is None else running.exemplar)

    def _failed(self, error: Exception) -> None:
        with suppress(Exception):
            self._metrics.errors.inc()
        with suppress(Exception):
            self._logs.emit(names.TELEMETRY_FAILED, error=repr(error))


class _NullOperation(Operation):
    __slots__ = ()

    def __init__(self) -> None:
        pass

    def set(self, **attributes: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        pass


class NullTelemetry(Telemetry):
    """The same calls, which do nothing and cost next to nothing."""

    def __init__(self) -> None:
        self._operation = _NullOperation()

    def operation(self, name: names.OperationName) -> Operation:  # noqa: D102
        return self._operation

    def within(self, parent: Context | None) -> AbstractContextManager[object]:  # noqa: D102
        return self._operation

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    observe_pools = moved = lookup = allocation = freed = compression = report = restored = committed = born = evicted = _nothing
    checked = check_failed = guard_changed = close = _nothing


NULL = NullTelemetry()
"""What the cache calls when it was given no telemetry."""
