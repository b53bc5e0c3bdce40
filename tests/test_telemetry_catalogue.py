"""The catalogue is a promise: these literal lists change only together with dashboards, alerts and the CHANGELOG."""

from __future__ import annotations

import math

import pytest

from mamba_checkpoint_cache.telemetry import catalogue
from mamba_checkpoint_cache.telemetry.catalogue import LOG_EVENTS, METRICS, OPERATIONS, SPAN_EVENTS, SPANS

POOLS = ("active", "checkpoint")
GOLDEN = [
    ("mamba_checkpoint_info", "gauge", {"codec": (), "state_dtype": (), "version": (), "fingerprint": ()}),
    ("mamba_checkpoint_slots", "gauge", {"pool": POOLS, "state": ("free", "reserved", "evictable", "locked")}),
    ("mamba_checkpoint_slot_capacity", "gauge", {"pool": POOLS}),
    ("mamba_checkpoint_bytes", "gauge", {"pool": POOLS, "kind": ("reserved", "occupied", "native_equivalent")}),
    ("mamba_checkpoint_layers", "gauge", {"codec": ()}),
    (
        "mamba_checkpoint_slot_allocations_total",
        "counter",
        {"pool": POOLS, "outcome": ("ok", "after_eviction", "exhausted", "all_locked")},
    ),
    (
        "mamba_checkpoint_slot_frees_total",
        "counter",
        {"pool": POOLS, "reason": ("released", "donated", "evicted", "non_finite", "aborted", "flushed")},
    ),
    ("mamba_checkpoint_compressions_total", "counter", {"outcome": ("stored", "non_finite", "rejected")}),
    ("mamba_checkpoint_restores_total", "counter", {"outcome": ("restored", "zeroed")}),
    ("mamba_checkpoint_codec_bytes_total", "counter", {"direction": ("in", "out")}),
    (
        "mamba_checkpoint_evictions_total",
        "counter",
        {
            "pool": ("checkpoint",),
            "reason": ("forced", "kv_pressure", "path_cap", "flush", "hop_cap", "guard"),
            "reused": ("yes", "no"),
        },
    ),
    ("mamba_checkpoint_commits_total", "counter", {"outcome": ("stored", "duplicate", "skipped")}),
    (
        "mamba_checkpoint_skips_total",
        "counter",
        {"reason": ("exhausted", "all_locked", "non_finite", "depth_mismatch", "too_short", "unaligned", "degraded")},
    ),
    ("mamba_checkpoint_lookups_total", "counter", {"outcome": ("hit", "miss")}),
    (
        "mamba_checkpoint_misses_total",
        "counter",
        {"reason": ("empty", "too_short", "no_shared_prefix", "never_checkpointed", "evicted", "whole_prompt", "hop_cap")},
    ),
    ("mamba_checkpoint_tokens_total", "counter", {"kind": ("prompt", "reused", "lost")}),
    (
        "mamba_checkpoint_operation_seconds",
        "histogram",
        {"operation": ("match", "alloc", "compress", "restore", "evict", "free", "commit")},
    ),
    ("mamba_checkpoint_relative_error", "histogram", {"scope": ("state", "worst_head")}),
    ("mamba_checkpoint_hops", "histogram", {}),
    ("mamba_checkpoint_logit_kl_nats", "histogram", {}),
    ("mamba_checkpoint_top1_agreement_total", "counter", {"agreed": ("yes", "no")}),
    ("mamba_checkpoint_drift_checks_total", "counter", {"outcome": ("ok", "over_budget", "failed", "skipped")}),
    ("mamba_checkpoint_guard_mode", "gauge", {"mode": ("normal", "native", "stopped")}),
    ("mamba_checkpoint_drift_budget", "gauge", {"kind": ("relative_error", "kl_nats")}),
    ("mamba_checkpoint_guard_changes_total", "counter", {"to": ("normal", "native", "stopped")}),
    ("mamba_checkpoint_residency_seconds", "histogram", {"ended": ("evicted", "flushed")}),
    ("mamba_checkpoint_telemetry_errors_total", "counter", {}),
]


def test_metrics_are_exactly_the_promised_ones() -> None:
    """Names, types, labels and label values are the published ones, in order."""
    found = [(metric.full_name, metric.type, {label.name: label.values for label in metric.labels}) for metric in METRICS]

    assert found == GOLDEN


def test_spans_and_log_events_are_exactly_the_promised_ones() -> None:
    """Every operation has its span; the three calls of the public API are boundaries."""
    assert {span.full_name: span.boundary for span in SPANS} == {
        "mamba_checkpoint.match": True,
        "mamba_checkpoint.restore": True,
        "mamba_checkpoint.commit": True,
        "mamba_checkpoint.alloc": False,
        "mamba_checkpoint.compress": False,
        "mamba_checkpoint.evict": False,
        "mamba_checkpoint.free": False,
    }
    assert {span.operation for span in SPANS} == set(OPERATIONS)
    assert [event.full_name for event in SPAN_EVENTS] == ["mamba_checkpoint.guard"]
    assert [(event.name, event.level) for event in LOG_EVENTS] == [
        ("mamba_checkpoint.slots_exhausted", "warning"),
        ("mamba_checkpoint.state_non_finite", "error"),
        ("mamba_checkpoint.drift_check_failed", "warning"),
        ("mamba_checkpoint.guard_degraded", "warning"),
        ("mamba_checkpoint.guard_recovered", "warning"),
        ("mamba_checkpoint.telemetry_failed", "warning"),
        ("mamba_checkpoint.operation", "debug"),
    ]


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_each_metric_follows_the_naming_rules(metric: catalogue.Metric) -> None:
    """Counters end in _total, units are base units and end the name, no ratio gauge, help is a sentence, labels are distinct."""
    assert metric.name.endswith("_total") == (metric.type == "counter")
    assert metric.name.removesuffix("_total").endswith(metric.unit)
    assert metric.unit in ("", "seconds", "bytes", "tokens", "nats")
    assert not metric.name.endswith(("ratio", "rate", "percent"))
    assert metric.help.endswith(".")
    assert len(set(metric.label_names)) == len(metric.label_names)
    assert metric.label_names[0] == "cache"
    for label in metric.labels:
        assert len(set(label.values)) == len(label.values)


@pytest.mark.parametrize("metric", [metric for metric in METRICS if metric.type == "histogram"], ids=lambda metric: metric.name)
def test_buckets_rise_and_have_a_reason(metric: catalogue.Metric) -> None:
    """Buckets are strictly rising, finite, at least 0 (so that the sum is exposed), and say why they are these."""
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert 0 <= metric.buckets[0] < metric.buckets[-1] < math.inf
    assert metric.why.endswith(".")


def test_buckets_cover_the_known_figures() -> None:
    """Known error and KL figures fall into different buckets; times span 1 us to seconds, residency to a day, hops 0 to 64."""
    buckets = {metric.name: metric.buckets for metric in METRICS}

    errors = [sum(bound < error for bound in buckets["relative_error"]) for error in (0.0, 0.0017, 0.0045, 0.0069, 0.0095, 0.02)]
    assert errors == sorted(set(errors))
    assert buckets["relative_error"][0] == 0
    kls = [sum(bound < kl for bound in buckets["logit_kl_nats"]) for kl in (0.0, 1e-5, 1e-4, 1.5e-3, 0.024, 0.06, 0.15, 2.0)]
    assert kls == sorted(set(kls))
    assert {0, 0.1} <= set(buckets["logit_kl_nats"]), "no drift, and the budget, can be read off exactly"
    assert (buckets["operation_seconds"][0], buckets["operation_seconds"][-1]) == (1e-6, 2.5)
    assert (buckets["residency_seconds"][0], buckets["residency_seconds"][-1]) == (1, 86400)
    assert (buckets["hops"][0], buckets["hops"][-1]) == (0, 64)


def test_the_catalogue_cannot_be_changed() -> None:
    """Entries are frozen: nothing renames a metric at run time."""
    with pytest.raises(AttributeError):
        METRICS[0].name = "renamed"  # type: ignore[misc]
