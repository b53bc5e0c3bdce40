"""Numbers read back from an exposition."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from mamba_checkpoint_cache.serving.scrape import Histogram, Scrape
from mamba_checkpoint_cache.telemetry.recorder import Telemetry


@pytest.fixture
def scrape() -> Scrape:
    """Two caches that have seen a little."""
    registry = CollectorRegistry()
    first, second = Telemetry("a", registry=registry), Telemetry("b", registry=registry)
    first.lookup(prompt=10, reused=4, lost=1, miss=None)
    second.lookup(prompt=5, reused=0, lost=0, miss="empty")
    first.evicted("forced", reused=True, birth=None)
    first.evicted("forced", reused=False, birth=None)
    for error in (0.0042, 0.0044, 0.0071):
        first.report(error, 0.02)
    return Scrape(generate_latest(registry).decode())


def test_caches_and_other_labels_are_added_up(scrape: Scrape) -> None:
    """What is asked for by one label is summed over all the others; values that never came up are there, at 0."""
    assert scrape.by("tokens_total", "kind") == {"prompt": 15, "reused": 4, "lost": 1}
    assert scrape.by("tokens_total", "kind", cache="b") == {"prompt": 5, "reused": 0, "lost": 0}
    others = dict.fromkeys(("kv_pressure", "path_cap", "flush", "hop_cap", "guard"), 0)
    assert scrape.by("evictions_total", "reason") == {"forced": 2} | others
    assert scrape.value("evictions_total", reused="yes") == 1


def test_an_unknown_series_is_an_error(scrape: Scrape) -> None:
    """A name that was mistyped is never read as 0."""
    with pytest.raises(KeyError, match="mamba_checkpoint_token_total"):
        scrape.value("token_total", kind="prompt")


def test_quantiles_of_a_scraped_histogram(scrape: Scrape) -> None:
    """Two of three errors lie in (0.004, 0.005], the last in (0.006, 0.008]."""
    errors = scrape.histogram("relative_error", scope="state")

    assert errors.quantile(0.5) == pytest.approx(0.004 + 0.001 * 1.5 / 2)
    assert errors.quantile(1.0) == pytest.approx(0.008)
    assert scrape.histogram("relative_error", scope="state", cache="b").quantile(0.5) is None


@pytest.mark.parametrize(
    ("buckets", "q", "expected"),
    [
        ([(0.0, 4), (1.0, 4), (float("inf"), 4)], 0.95, 0.0),
        ([(0.0, 0), (1.0, 10), (3.0, 30), (float("inf"), 30)], 2 / 3, 2.0),
        ([(1.0, 1), (float("inf"), 2)], 1.0, None),
        ([], 0.5, None),
    ],
)
def test_quantiles(buckets: list[tuple[float, float]], q: float, expected: float | None) -> None:
    """All at the lowest bound is that bound; between bounds is interpolated; beyond the last finite one, nothing is claimed."""
    assert Histogram(buckets).quantile(q) == (None if expected is None else pytest.approx(expected))
