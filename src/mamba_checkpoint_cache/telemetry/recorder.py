"""Telemetry: what the cache calls to say what happened. It never raises, never waits, and never changes what the cache does."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any, Self

from opentelemetry.context import Context
from opentelemetry.trace import TracerProvider
from prometheus_client import CollectorRegistry

from mamba_checkpoint_cache.telemetry import catalogue as names
from mamba_checkpoint_cache.telemetry.containment import Containment
from mamba_checkpoint_cache.telemetry.instruments import Histogram
from mamba_checkpoint_cache.telemetry.logs import Logs
from mamba_checkpoint_cache.telemetry.metrics import SETTLE_EVERY, Metrics, PoolSnapshot, PoolsSnapshot
from mamba_checkpoint_cache.telemetry.operation import Instruments, Operation, Silent, Step, Within
from mamba_checkpoint_cache.telemetry.tracing import Scalar, Trace, Tracing, around

__all__ = ["NULL", "NullTelemetry", "Operation", "PoolSnapshot", "PoolsSnapshot", "Telemetry"]


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
        self._add = self._metrics.add
        histogram = self._metrics.histograms
        self._state_error, self._head_error = histogram["relative_error", "state"], histogram["relative_error", "worst_head"]
        self._hops, self._logit_kl = histogram["hops",], histogram["logit_kl_nats",]
        self._lived = {ended: histogram["residency_seconds", ended] for ended in ("evicted", "flushed")}
        self._tracing = Tracing(cache, tracer_provider)
        self._instruments = Instruments(self._metrics, self._tracing, self._logs, self._contained, clock)
        self._silent = {name: Silent(self._instruments, name) for name in names.OPERATIONS}
        self._steps = {name: Step(self._instruments, name) for name in names.OPERATIONS}
        with self._contained:
            self._metrics.share()

    def observe_pools(self, source: Callable[[], PoolsSnapshot]) -> None:
        """Call ``source`` at every scrape, from the scraping thread, and expose what it returns as gauges."""
        self._metrics.source = source
        self._metrics.publish()

    def moved(self) -> None:
        """Slots have moved outside of any operation."""
        self._metrics.publish(settle_from=SETTLE_EVERY)

    def operation(self, name: names.OperationName, earlier: Trace | None = None) -> Operation:
        """A context manager around one operation. What its body raises passes through, and the span notes it.

        ``earlier`` is the trace of an earlier operation of the same request, to which this one belongs where nothing else is
        current.
        """
        instruments = self._instruments
        outer = instruments.current
        if outer is None:
            if earlier is not None and not earlier.heard and around(instruments.parent) is earlier.outside:
                return self._silent.get(name) or Operation(instruments, name)
        elif outer.unheard:
            return self._steps.get(name) or Operation(instruments, name)
        return Operation(instruments, name, earlier)

    def within(self, parent: Context | None) -> AbstractContextManager[object]:
        """A block whose calls belong to ``parent``, as ``opentelemetry.context.get_current()`` gave it where a request came in.

        For engines that serve the requests of many threads or tasks on one thread, on which nothing of theirs is current. With
        None, the calls belong to what is current on the thread, as they do outside. The block must not await.
        """
        return Within(self._instruments, parent)

    def lookup(self, *, prompt: int, reused: int, lost: int, miss: names.MissReason | None) -> None:
        """A prompt was looked up; all counts in tokens. ``miss`` says why no more was reused, also on a hit."""
        with self._contained:
            self._add(("lookups_total", "hit" if reused > 0 else "miss", 1))
            self._add(("tokens_total", "prompt", prompt))
            self._add(("tokens_total", "reused", reused))
            self._add(("tokens_total", "lost", lost))
            if miss is not None:
                self._add(("misses_total", miss, 1))

    def allocation(self, pool: names.Pool, outcome: names.AllocationOutcome) -> None:
        """One attempt to take a slot ended."""
        self._add(("slot_allocations_total", pool, outcome, 1))

    def freed(self, pool: names.Pool, reason: names.FreeReason) -> None:
        """One slot was given back."""
        self._add(("slot_frees_total", pool, reason, 1))

    def compression(self, outcome: names.CompressionOutcome, *, bytes_in: int = 0, bytes_out: int = 0) -> None:
        """One state went through the codec, or was refused."""
        self._add(("compressions_total", outcome, 1))
        self._add(("codec_bytes_total", "in", bytes_in))
        self._add(("codec_bytes_total", "out", bytes_out))
        if outcome == "non_finite":
            with self._contained:
                self._logs.emit(names.STATE_NON_FINITE)

    def report(self, relative_error: float, worst_head: float) -> None:
        """The report of one compression has arrived: Frobenius error over norm, of the state and of its worst head."""
        self._observe(relative_error, self._state_error)
        self._observe(worst_head, self._head_error)

    def restored(self, outcome: names.RestoreOutcome, hops: int, *, bytes_in: int = 0, bytes_out: int = 0) -> None:
        """One active slot was written: from a checkpoint with ``hops`` lossy round trips behind it, or zeroed."""
        self._add(("restores_total", outcome, 1))
        self._add(("codec_bytes_total", "in", bytes_in))
        self._add(("codec_bytes_total", "out", bytes_out))
        if outcome == "restored":
            self._observe(hops, self._hops)

    def committed(self, outcome: names.CommitOutcome, reason: names.SkipReason | None = None) -> None:
        """One commit ended; ``reason`` says why it stored nothing."""
        self._add(("commits_total", outcome, 1))
        if reason is not None:
            self._add(("skips_total", reason, 1))
            with self._contained:
                if reason in names.NO_SLOT:
                    self._logs.emit(names.SLOTS_EXHAUSTED, reason=reason)

    def born(self) -> object:
        """What to keep beside a checkpoint that is being stored, and to hand to ``evicted`` when it goes."""
        try:  # rather than ``with contained``, whose price would be most of a small call's
            running = self._instruments.current
            commit = running.commit() if running is not None and running.recording else None
            return self._clock(), commit
        except Exception as error:  # noqa: BLE001
            self._contained.on_error(error)
            return None

    def evicted(self, reason: names.EvictionReason, reused: bool, birth: object) -> None:
        """One checkpoint was dropped. The span that runs links to the commit that stored it."""
        try:
            self._add(("evictions_total", "checkpoint", reason, "yes" if reused else "no", 1))
            if isinstance(birth, tuple):
                born, commit = birth
                self._observe(self._clock() - born, self._lived["flushed" if reason == "flush" else "evicted"])
                if commit is not None and (running := self._instruments.current) is not None:
                    running.span.add_link(commit)
        except Exception as error:  # noqa: BLE001
            self._contained.on_error(error)

    def checked(self, outcome: names.DriftOutcome, *, kl_nats: Iterable[float] = (), agreed: Iterable[bool] = ()) -> None:
        """One sampled logit check ended: by position, the KL (left out if not finite) and whether both runs agreed."""
        with self._contained:
            self._add(("drift_checks_total", outcome, 1))
            for value in kl_nats:
                if math.isfinite(value):
                    self._observe(value, self._logit_kl)
            for same in agreed:
                self._add(("top1_agreement_total", "yes" if same else "no", 1))
        self._metrics.publish()

    def check_failed(self, error: Exception) -> None:
        """A sampled logit check came to nothing because of ``error``; :meth:`checked` counts it."""
        with self._contained:
            self._logs.emit(names.CHECK_FAILED, error=repr(error))

    def guard_changed(self, to: names.GuardMode, *, cause: str, commits: int, codec: str) -> None:
        """The drift guard changed its mode, ``commits`` commits after the change before; ``codec`` is what is used from here on.

        An event on the span that is current.
        """
        with self._contained:
            self._add(("guard_changes_total", to, 1))
            fields: dict[str, Scalar] = {"mode": to, "cause": cause, "commits": commits, "codec": codec}
            self._tracing.event(names.GUARD_EVENT, fields)
            self._logs.emit(names.GUARD_RECOVERED if to == "normal" else names.GUARD_DEGRADED, **fields)
        self._metrics.publish()

    def close(self) -> None:
        """Take the series out of the registry and let go of the pools: the name is free again. May be called twice."""
        with self._contained:
            self._metrics.close()

    def _observe(self, value: float, histogram: Histogram) -> None:
        """Note a value, with the trace that it was seen in if somebody keeps that."""
        running = self._instruments.current
        if running is None or running.exemplar is None:
            histogram.fresh.append(value)
        else:
            with self._contained:
                histogram.observe(value, running.exemplar)

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

    def operation(self, name: names.OperationName, earlier: Trace | None = None) -> Operation:  # noqa: D102
        return self._operation

    def within(self, parent: Context | None) -> AbstractContextManager[object]:  # noqa: D102
        return self._operation

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    observe_pools = moved = lookup = allocation = freed = compression = report = restored = committed = born = evicted = _nothing
    checked = check_failed = guard_changed = close = _nothing


NULL = NullTelemetry()
"""What the cache calls when it was given no telemetry."""
