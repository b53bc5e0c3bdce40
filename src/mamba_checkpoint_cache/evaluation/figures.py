"""From trials to figures: drift by distance and hops, agreement by margin, state error by layer and head."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mamba_checkpoint_cache.evaluation.arms import ArmKey
from mamba_checkpoint_cache.evaluation.lockstep import STEP, Trial
from mamba_checkpoint_cache.evaluation.statistics import bootstrap_interval, percentile

DISTANCES = (1, 16, 64, 256)
HOPS = (1, 2, 4, 8, 16)
WINDOW = 16
"""Positions that are averaged at a distance: the last so many up to it, as single ones are noisy."""
MARGINS = (0.0, 0.05, 0.2, 0.5, 1.0)
"""Bounds of the classes in which agreement is counted."""


def points() -> list[tuple[int, int]]:
    """``(hops, distance)`` of every row: all distances after one restore, and those within a step after more."""
    once = [(1, distance) for distance in DISTANCES]
    return once + [(hops, distance) for hops in HOPS[1:] for distance in DISTANCES if distance <= STEP]


def drift(trials: Sequence[Trial], name: str, hops: int, distance: int) -> dict[str, Any] | None:
    """Drift at ``distance`` tokens after the last of ``hops`` restores; None if no prompt is as long.

    KL (nats) and agreement are of the last :data:`WINDOW` positions up to the distance, fewer where they would lie before the
    restore: ``kl_mean`` and ``top1`` are means, ``kl_p95`` and ``kl_p99`` percentiles over positions and prompts, ``kl_ci`` the
    interval of the mean over prompts. ``relative_error``, ``worst_layer`` and ``worst_head`` are of the state right after that
    restore.
    """
    key, first = ArmKey(name, again=hops > 1), (hops - 1) * STEP
    end = first + distance
    traces = [trial.arms[key] for trial in trials if len(trial.margins) >= end]
    if not traces:
        return None
    window = slice(max(first, end - WINDOW), end)
    kl = torch.stack([trace.kl_nats[window] for trace in traces])
    energies = [trace.energies[hops - 1] for trace in traces]
    return {
        "kl_mean": float(kl.mean()),
        "kl_p95": percentile(kl.flatten(), 0.95),
        "kl_p99": percentile(kl.flatten(), 0.99),
        "kl_ci": bootstrap_interval(kl.mean(-1).tolist()),
        "top1": _share(torch.cat([trace.agreed[window] for trace in traces])),
        "relative_error": relative_error(energies),
        "worst_layer": float(layer_errors(energies).max()),
        "worst_head": float(head_errors(energies).max()),
        "prompts": len(traces),
    }


def relative_error(energies: Sequence[Tensor]) -> float:
    """Norm of the difference over norm of the state, both over all prompts, layers and heads; 0 for states of zeros."""
    signal, error = torch.stack(list(energies)).sum((0, 1, 2)).tolist()
    return float(_ratio(torch.tensor(error), torch.tensor(signal)))


def layer_errors(energies: Sequence[Tensor]) -> Tensor:
    """The same by layer, ``[layers]``."""
    signal, error = torch.stack(list(energies)).sum((0, 2)).unbind(-1)
    return _ratio(error, signal)


def head_errors(energies: Sequence[Tensor]) -> Tensor:
    """The same by layer and head, ``[layers, heads]``."""
    signal, error = torch.stack(list(energies)).sum(0).unbind(-1)
    return _ratio(error, signal)


def mean_kl(trials: Sequence[Trial], key: ArmKey) -> float:
    """Mean KL of an arm in nats, over all positions of all prompts."""
    return float(torch.cat([trial.arms[key].kl_nats for trial in trials]).mean())


def largest_kl(trials: Sequence[Trial], name: str) -> float:
    """The largest KL of any position, restored once or again and again; NaN if any is."""
    return float(torch.cat([trace.kl_nats for trial in trials for key, trace in trial.arms.items() if key.name == name]).max())


def agreement(trials: Sequence[Trial], name: str) -> list[dict[str, Any]]:
    """Top-1 agreement after one restore, by the reference's margin in classes ``from`` … ``to``; the last row has all."""
    margins = torch.cat([trial.margins for trial in trials])
    agreed = torch.cat([trial.arms[ArmKey(name)].agreed for trial in trials])
    rows = []
    for low, high in [*pairwise(MARGINS), (MARGINS[0], MARGINS[-1])]:
        inside = (margins >= low) & ((margins < high) | (high == MARGINS[-1]))
        count = int(inside.sum())
        rows.append({"from": low, "to": high, "positions": count, "top1": _share(agreed[inside]) if count else None})
    return rows


def _share(flags: Tensor) -> float:
    return float(flags.double().mean())


def _ratio(error: Tensor, signal: Tensor) -> Tensor:
    return torch.where(error > 0, error / signal, error).sqrt()
