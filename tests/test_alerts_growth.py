"""Exhaustion is announced in time, and a healthy pool never: pools that lock up, simulated under the rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from alert_side import CACHE, RELEASES, as_read_by, rules, run, write
from tools import require_tool

IMMINENT = "MambaCheckpointPoolExhaustionImminent"


@pytest.fixture(scope="module", params=RELEASES)
def alerts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the alerts, as a release of Prometheus reads it."""
    return as_read_by(request.param, tmp_path_factory.mktemp("alerts"))


STEP = 30
"""Seconds between two samples."""
QUIET = [0] * 120


def linear(minutes: int, slots: int) -> list[int]:
    """Locked slots that grow evenly from none to all, after a quiet time, and stay."""
    steps = minutes * 60 // STEP
    return [*QUIET, *(slots * n // steps for n in range(steps + 1)), *[slots] * 20]


def stairs(size: int, minutes: int, slots: int) -> list[int]:
    """Locked slots that grow by ``size`` every so many minutes, after a quiet time, and stay."""
    counts = range(size, slots + size, size)
    return [*QUIET, *(min(slots, count) for count in counts for _ in range(minutes * 60 // STEP)), *[slots] * 20]


def restless(locked: list[int], slots: int) -> list[int]:
    """The same with locks that come and go on top, as traffic makes them."""
    return [min(slots, count + n * 7 % 5) if 0 < count < slots else count for n, count in enumerate(locked)]


def simulate(folder: Path, alerts: Path, locked: list[int], slots: int, query: str, expected: list[dict[str, Any]]) -> None:
    """Let a pool whose locked slots go like this run under the rules, and compare what a query says at the end."""
    recorded = write(folder / "recording.yml", {"groups": [{"name": "r", "rules": rules(alerts / "recording.yml")[:1]}]})
    imminent = [rule for rule in rules(alerts / "alerting.yml") if rule["alert"] == IMMINENT]
    values = {
        ("slots", "locked"): locked,
        ("slots", "evictable"): [slots - count for count in locked],
        ("slots", "free"): [0] * len(locked),
        ("slot_capacity", None): [slots] * len(locked),
    }
    series = []
    for (name, state), counts in values.items():
        labels = {**CACHE, "pool": "checkpoint", **({"state": state} if state else {})}
        selector = ",".join(f'{label}="{value}"' for label, value in labels.items())
        series.append({"series": f"mamba_checkpoint_{name}{{{selector}}}", "values": " ".join(map(str, counts))})
    end = f"{STEP * (len(locked) - 1)}s"
    test = {
        "interval": f"{STEP}s",
        "input_series": series,
        "promql_expr_test": [{"expr": query, "eval_time": end, "exp_samples": expected}],
    }
    content = {
        "rule_files": [str(recorded), str(write(folder / "imminent.yml", {"groups": [{"name": "i", "rules": imminent}]}))],
        "evaluation_interval": f"{STEP}s",
        "group_eval_order": ["r", "i"],
        "tests": [test],
    }
    run(require_tool("promtool"), "test", "rules", write(folder / "growth.yml", content))


SLOTS = 64
FIRING = f'ALERTS{{alertname="{IMMINENT}",alertstate="firing"}}'
WARNING = f"""
  min(min_over_time(timestamp(mamba_checkpoint:reclaimable:share == 0)[1d:{STEP}s]))
    - min(min_over_time(timestamp({FIRING})[1d:{STEP}s]))
"""
STAIRS = ((13, 10), (8, 10), (4, 10), (16, 15))
GROWTH = {
    **{f"evenly in {minutes} minutes": linear(minutes, SLOTS) for minutes in (25, 30, 45, 60, 120, 240)},
    "evenly in an hour under traffic": restless(linear(60, SLOTS), SLOTS),
    **{f"by {size} every {minutes} minutes": stairs(size, minutes, SLOTS) for size, minutes in STAIRS},
    "by 8 every 10 minutes under traffic": restless(stairs(8, 10, SLOTS), SLOTS),
    **{f"evenly in {minutes} minutes from the start": linear(minutes, SLOTS)[len(QUIET) :] for minutes in (25, 45, 60, 120)},
    "by 8 every 10 minutes from the start": stairs(8, 10, SLOTS)[len(QUIET) :],
}


@pytest.mark.parametrize("growth", GROWTH.values(), ids=GROWTH.keys())
def test_exhaustion_is_announced_ten_minutes_ahead(growth: list[int], alerts: Path, tmp_path: Path) -> None:
    """A pool whose locked slots grow from none to all, evenly or in steps, raises the alert at least ten minutes ahead."""
    simulate(tmp_path, alerts, growth, SLOTS, f"{WARNING} >= bool 600", [{"labels": "{}", "value": 1}])


HEALTHY = {
    "traffic on a full pool": [n * 37 % 9 for n in range(480)],
    "bursts on a full pool": [*QUIET, *([0] * 20 + [24] * 10) * 12],
    "a rise to a third": [*QUIET, *(min(SLOTS // 3, n) for n in range(200))],
    "a rise to a third, and back": [*QUIET, *(max(0, 21 - abs(21 - n)) for n in range(200))],
    "half of it locked in one step, and no more": [*QUIET, *[SLOTS // 2] * 240],
    **{
        f"half of it locked in one step, {minutes} minutes after the start": [0] * (minutes * 2) + [SLOTS // 2] * 240
        for minutes in (1, 5, 10, 20, 30, 40, 44, 46)
    },
    "half of it locked from the start": [SLOTS // 2] * 240,
    "half of it locked all the time, more or less": [SLOTS // 2 + n * 7 % 9 - 4 for n in range(480)],
}


@pytest.mark.parametrize("locked", HEALTHY.values(), ids=HEALTHY.keys())
def test_a_healthy_pool_is_not_announced(locked: list[int], alerts: Path, tmp_path: Path) -> None:
    """A full pool whose checkpoints can be evicted never raises the alert, whatever traffic locks for a while."""
    simulate(tmp_path, alerts, locked, SLOTS, f"count_over_time({FIRING}[1d])", [])
