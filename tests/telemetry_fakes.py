"""What the telemetry tests share: a clock that is set by hand, pools that are, and a registry read as a dict."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from mamba_checkpoint_cache.telemetry import PoolSnapshot, PoolsSnapshot


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def tick(self, seconds: float) -> None:
        self.now += seconds


class Pools:
    """A stand-in for a cache: two pools whose slots are moved by hand."""

    def __init__(self) -> None:
        self.active = (8, 0, 0, 0)
        self.checkpoint = (16, 0, 0, 0)

    def __call__(self) -> PoolsSnapshot:
        return PoolsSnapshot(
            (
                PoolSnapshot("active", 8, self.active, 900, 100 * self.active[3], 100 * self.active[3]),
                PoolSnapshot("checkpoint", 16, self.checkpoint, 510, 30 * self.checkpoint[2], 100 * self.checkpoint[2]),
            ),
            {"codec": "int8", "state_dtype": "float32", "fingerprint": "0123456789abcdef-int8"},
        )


def scrape(registry: CollectorRegistry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample of one scrape, by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


def value(registry: CollectorRegistry, name: str, /, cache: str = "default", **labels: str) -> float | None:
    """One sample of ``mamba_checkpoint_<name>``, or None if there is no such series."""
    return registry.get_sample_value(f"mamba_checkpoint_{name}", {"cache": cache, **labels})
