"""Every metric, span and log event this package emits, and every value a label may take: the single source of those names.

They are public: dashboards, alerts and users rely on them. Nothing else in the package spells one out of its own accord.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, get_args

SCOPE = "mamba_checkpoint_cache"
PREFIX = "mamba_checkpoint"
CACHE_LABEL = "cache"
"""Every series carries the name of the cache under this label, before its own labels."""

try:
    VERSION = version("mamba-checkpoint-cache")
except PackageNotFoundError:  # imported from a source tree that was never installed
    VERSION = "unknown"

Pool = Literal["active", "checkpoint"]
SlotState = Literal["free", "reserved", "evictable", "locked"]
ByteKind = Literal["reserved", "occupied", "native_equivalent"]
OperationName = Literal["match", "alloc", "compress", "restore", "evict", "free", "commit"]
AllocationOutcome = Literal["ok", "after_eviction", "exhausted", "all_locked"]
FreeReason = Literal["released", "donated", "evicted", "non_finite", "aborted", "flushed"]
CompressionOutcome = Literal["stored", "non_finite", "rejected"]
RestoreOutcome = Literal["restored", "zeroed"]
EvictionReason = Literal["forced", "kv_pressure", "path_cap", "flush", "hop_cap", "guard"]
CommitOutcome = Literal["stored", "duplicate", "skipped"]
SkipReason = Literal["exhausted", "all_locked", "non_finite", "depth_mismatch", "too_short", "unaligned", "degraded"]
MissReason = Literal["empty", "too_short", "no_shared_prefix", "never_checkpointed", "evicted", "whole_prompt", "hop_cap"]
DriftOutcome = Literal["ok", "over_budget", "failed", "skipped"]
GuardMode = Literal["normal", "native", "stopped"]

POOLS: tuple[Pool, ...] = get_args(Pool)
SLOT_STATES: tuple[SlotState, ...] = get_args(SlotState)
BYTE_KINDS: tuple[ByteKind, ...] = get_args(ByteKind)
OPERATIONS: tuple[OperationName, ...] = get_args(OperationName)
SKIP_REASONS: tuple[SkipReason, ...] = get_args(SkipReason)
MISS_REASONS: tuple[MissReason, ...] = get_args(MissReason)
GUARD_MODES: tuple[GuardMode, ...] = get_args(GuardMode)
NO_SLOT: tuple[SkipReason, ...] = ("exhausted", "all_locked")
"""The skip reasons that mean: the checkpoint pool had no slot to give."""


@dataclass(frozen=True, slots=True)
class Label:
    """One label of a metric: its enumerated values, or none where the configuration of the cache fixes them."""

    name: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family. ``unit`` is the base unit that ends the name, if one does; ``why`` says why the buckets are these."""

    name: str
    type: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[Label, ...] = ()
    unit: str = ""
    buckets: tuple[float, ...] = ()
    why: str = ""

    @property
    def full_name(self) -> str:
        """The name as it is scraped and queried, but for the suffixes of a histogram."""
        return f"{PREFIX}_{self.name}"

    @property
    def label_names(self) -> tuple[str, ...]:
        """``cache``, then the metric's own labels in order."""
        return (CACHE_LABEL, *(label.name for label in self.labels))


@dataclass(frozen=True, slots=True)
class Span:
    """One kind of span. ``boundary`` spans are calls of the public API; the others happen inside one of those."""

    operation: OperationName
    boundary: bool
    help: str
    attributes: tuple[str, ...]

    @property
    def full_name(self) -> str:
        """The name as it is exported."""
        return f"{PREFIX}.{self.operation}"


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something that happens while a span is open, whichever is current then."""

    name: str
    help: str
    attributes: tuple[str, ...]

    @property
    def full_name(self) -> str:
        """The name as it is exported."""
        return f"{PREFIX}.{self.name}"


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One kind of log line; ``fields`` come on top of cache, trace_id and, where lines were held back, suppressed."""

    name: str
    level: Literal["debug", "warning", "error"]
    help: str
    fields: tuple[str, ...]


_POOL = Label("pool", POOLS)

METRICS = (
    Metric(
        "info",
        "gauge",
        "Always 1; the labels say what is running.",
        (Label("codec"), Label("state_dtype"), Label("version"), Label("fingerprint")),
    ),
    Metric("slots", "gauge", "Slots by state; the four states add up to the capacity.", (_POOL, Label("state", SLOT_STATES))),
    Metric("slot_capacity", "gauge", "Slots in the pool, the padding row not counted.", (_POOL,)),
    Metric(
        "bytes",
        "gauge",
        "Memory of the pool's tensors, of the slots in use, and what those slots would take uncompressed. "
        "Saved is native_equivalent minus occupied.",
        (_POOL, Label("kind", BYTE_KINDS)),
        unit="bytes",
    ),
    Metric(
        "layers",
        "gauge",
        "Recurrent layers of a checkpoint by the format that they are kept in now, every format there is; what the drift guard "
        "keeps native is none.",
        (Label("codec"),),
    ),
    Metric(
        "slot_allocations_total",
        "counter",
        "Attempts to take a slot, each counted once.",
        (_POOL, Label("outcome", get_args(AllocationOutcome))),
    ),
    Metric("slot_frees_total", "counter", "Slots given back.", (_POOL, Label("reason", get_args(FreeReason)))),
    Metric("compressions_total", "counter", "States given to the codec.", (Label("outcome", get_args(CompressionOutcome)),)),
    Metric(
        "restores_total",
        "counter",
        "States written into an active slot: from a checkpoint, or zeroed for want of one.",
        (Label("outcome", get_args(RestoreOutcome)),),
    ),
    Metric(
        "codec_bytes_total",
        "counter",
        "Bytes that the codec read (in) and wrote (out), compressing and restoring.",
        (Label("direction", ("in", "out")),),
        unit="bytes",
    ),
    Metric(
        "evictions_total",
        "counter",
        "Checkpoints dropped, and whether they were ever used. forced: an allocation found no free slot; hop_cap: a state with "
        "fewer lossy round trips took its place; guard: the drift guard changed its mode, which starts over.",
        (Label("pool", ("checkpoint",)), Label("reason", get_args(EvictionReason)), Label("reused", ("yes", "no"))),
    ),
    Metric("commits_total", "counter", "Commits by what became of them.", (Label("outcome", get_args(CommitOutcome)),)),
    Metric("skips_total", "counter", "Commits that stored nothing, and why.", (Label("reason", SKIP_REASONS),)),
    Metric("lookups_total", "counter", "Prefix matches that reused anything, or nothing.", (Label("outcome", ("hit", "miss")),)),
    Metric("misses_total", "counter", "Why nothing, or nothing deeper, was usable.", (Label("reason", MISS_REASONS),)),
    Metric(
        "tokens_total",
        "counter",
        "Prompt tokens looked up; those reused; those lost, where KV matched but no checkpoint allowed to continue.",
        (Label("kind", ("prompt", "reused", "lost")),),
        unit="tokens",
    ),
    Metric(
        "operation_seconds",
        "histogram",
        "Time that the calling thread spent in each operation.",
        (Label("operation", OPERATIONS),),
        unit="seconds",
        buckets=(
            *(1e-6, 2.5e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3),
            *(2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5),
        ),
        why="A free takes about 1 us, a match 5 to 50 us, a state codec 1 to 100 ms; an eager codec on a CPU up to seconds.",
    ),
    Metric(
        "relative_error",
        "histogram",
        "Frobenius error of each compression relative to the state: of the whole state, and of its worst head.",
        (Label("scope", ("state", "worst_head")),),
        buckets=(0, 5e-4, 1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 6e-3, 8e-3, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.3, 1),
        why="Exactly 0 without a codec, 0.0017 for bfloat16, 0.004 to 0.01 for int8 (finest there), 1 when nothing is left.",
    ),
    Metric(
        "hops",
        "histogram",
        "Lossy round trips behind each restored state.",
        buckets=(0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64),
        why="0 is lossless and most are few; sixteen multiply the error two to five times.",
    ),
    Metric(
        "logit_kl_nats",
        "histogram",
        "KL divergence between the next-token distributions of a recomputed and a restored run, position by position, sampled.",
        unit="nats",
        buckets=(0, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1),
        why="Exactly 0 without a codec, about 1e-5 for bfloat16, 1e-4 to 0.05 for int8; 0.1 is the budget, 1 another state.",
    ),
    Metric(
        "top1_agreement_total",
        "counter",
        "Positions of the same checks, by whether both runs found the same token likeliest.",
        (Label("agreed", ("yes", "no")),),
    ),
    Metric(
        "drift_checks_total",
        "counter",
        "Sampled comparisons of a restored run with a recomputed one; skipped ones were due, but not made.",
        (Label("outcome", get_args(DriftOutcome)),),
    ),
    Metric(
        "guard_mode",
        "gauge",
        "1 for the drift guard's mode, 0 for the others; without a guard there is no such series.",
        (Label("mode", GUARD_MODES),),
    ),
    Metric(
        "drift_budget",
        "gauge",
        "The drift guard's ceilings, on a compression's relative error and on a check's mean KL in nats; none without a guard.",
        (Label("kind", ("relative_error", "kl_nats")),),
    ),
    Metric(
        "guard_changes_total",
        "counter",
        "Changes of the drift guard's mode, or of the layers it keeps native.",
        (Label("to", GUARD_MODES),),
    ),
    Metric(
        "residency_seconds",
        "histogram",
        "How long a checkpoint lived.",
        (Label("ended", ("evicted", "flushed")),),
        unit="seconds",
        buckets=(1, 5, 15, 60, 300, 900, 3600, 10800, 21600, 43200, 86400),
        why="Seconds are thrashing, minutes a conversation, hours a system prompt; a day is as good as for ever.",
    ),
    Metric("telemetry_errors_total", "counter", "Failures of telemetry itself, contained and without effect on the cache."),
)

SPANS = (
    Span("match", True, "Look up the longest usable prefix.", ("cache", "depth", "outcome", "reason")),
    Span("restore", True, "Write a checkpoint, or zeros, into an active slot.", ("cache", "depth", "hops", "outcome")),
    Span("commit", True, "Store a checkpoint.", ("cache", "depth", "outcome", "reason")),
    Span("alloc", False, "Take a slot.", ("cache", "pool", "outcome")),
    Span("compress", False, "Compress a state into a slot.", ("cache", "pool", "bytes")),
    Span(
        "evict",
        False,
        "Drop a checkpoint, or a leaf's KV with it; linked to the commit that stored it.",
        ("cache", "pool", "reason", "forced", "depth", "tokens"),
    ),
    Span("free", False, "Give a slot back.", ("cache", "pool", "reason", "depth")),
)

GUARD_EVENT = SpanEvent("guard", "The drift guard changed its mode.", ("cache", "mode", "cause", "commits", "codec"))
SPAN_EVENTS = (GUARD_EVENT,)

SLOTS_EXHAUSTED = LogEvent(
    f"{PREFIX}.slots_exhausted", "warning", "A commit stored nothing: the checkpoint pool had no slot to give.", ("reason",)
)
STATE_NON_FINITE = LogEvent(f"{PREFIX}.state_non_finite", "error", "A state with NaN or Inf was refused.", ())
CHECK_FAILED = LogEvent(
    f"{PREFIX}.drift_check_failed", "warning", "The recomputation of a sampled logit check failed, and was contained.", ("error",)
)
GUARD_DEGRADED = LogEvent(
    f"{PREFIX}.guard_degraded",
    "warning",
    "Compressed states drifted over the budget: the cache has started over with what drifted kept native, which makes its codec "
    "the one that is named, or has stopped storing.",
    ("mode", "cause", "commits", "codec"),
)
GUARD_RECOVERED = LogEvent(
    f"{PREFIX}.guard_recovered",
    "warning",  # whoever was told of the one must be told of the other
    "Trials of the codec kept within the budget: the cache has started over with compressed states.",
    ("mode", "cause", "commits", "codec"),
)
TELEMETRY_FAILED = LogEvent(f"{PREFIX}.telemetry_failed", "warning", "Telemetry failed, and was contained.", ("error",))
OPERATION_DONE = LogEvent(
    f"{PREFIX}.operation",
    "debug",
    "An operation ended; carries the attributes of its span. Only with a logger passed in, or once structlog is configured.",
    ("operation", "seconds"),
)
LOG_EVENTS = (SLOTS_EXHAUSTED, STATE_NON_FINITE, CHECK_FAILED, GUARD_DEGRADED, GUARD_RECOVERED, TELEMETRY_FAILED, OPERATION_DONE)
