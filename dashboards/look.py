"""What all panels share: thresholds, colours, runbook links, and how a query and a legend are written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from grafana_foundation_sdk.builders import common as widgets
from grafana_foundation_sdk.builders import dashboard as grid
from grafana_foundation_sdk.builders import heatmap, prometheus, stat, statetimeline, table, timeseries, xychart
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models

from mamba_checkpoint_cache.telemetry.catalogue import METRICS

ALERTS = "MambaCheckpoint"
"""What the name of every alert starts with."""
RUNBOOKS = "/public/runbooks"
"""Where the runbooks are: on the Grafana server itself, which serves what is mounted under its ``public`` folder."""
DATA_SOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")

QUIET = "no such traffic in this time"
"""What is said where a panel has nothing to show."""

Limits = Sequence[tuple[float | None, str]]
"""Colours, each from its value upwards; the first from minus infinity."""
NEUTRAL: Limits = ((None, "blue"),)
"""For what is neither good nor bad, whatever its value."""

_COLOURED = {
    "green": ("free", "ok", "stored", "hit", "reused", "restored", "normal", "never reused"),
    "light-green": ("too_short", "whole_prompt"),
    "blue": ("evictable", "after_eviction", "duplicate", "new", "as stored", "forced", "restore", "read", "released"),
    "light-blue": ("p50", "no_shared_prefix", "path_cap", "alloc", "donated"),
    "super-light-blue": ("p10", "empty", "unaligned"),
    "purple": ("reserved", "zeroed", "skipped", "hop_cap", "compress", "p90"),
    "semi-dark-purple": ("flushed", "flush"),
    "yellow": ("never_checkpointed", "aborted", "guard", "evict", "written"),
    "orange": ("locked", "native", "lost", "evicted", "had been reused", "degraded", "kv_pressure", "commit", "uncompressed"),
    "red": ("exhausted", "non_finite", "over_budget", "stopped", "failed", "rejected"),
    "dark-red": ("all_locked", "depth_mismatch"),
    "text": ("capacity", "pool", "miss", "match"),
}
COLOURS = {name: colour for colour, names in _COLOURED.items() for name in names}
"""What a name in a legend is drawn in, on every panel: red only for what somebody has to look at."""

Panel = TypeVar("Panel", timeseries.Panel, stat.Panel, heatmap.Panel, statetimeline.Panel, table.Panel, xychart.Panel)


def low_is_bad(red: float, yellow: float) -> Limits:
    """Red under ``red``, yellow under ``yellow``, else green. What isn't there has no colour."""
    return ((None, "text"), (0, "red"), (red, "yellow"), (yellow, "green"))


def high_is_bad(yellow: float | None, red: float | None = None) -> Limits:
    """Green, from ``yellow`` on yellow, from ``red`` on red. What isn't there has no colour."""
    bad = ((at, name) for at, name in ((yellow, "yellow"), (red, "red")) if at is not None)
    return ((None, "text"), (0, "green"), *bad)


def shaded(limits: Limits) -> Limits:
    """The same for a background: only what is bad has a colour."""
    return tuple((at, colour if colour in ("yellow", "red") else "transparent") for at, colour in limits)


def finish(panel: Panel, title: str, description: str, unit: str, limits: Limits, runbooks: str, empty: str = QUIET) -> Panel:
    """Put on what every panel has; ``runbooks`` are alerts without their prefix, with spaces between."""
    panel = panel.title(title).description(description).unit(unit).thresholds(thresholds(limits)).datasource(DATA_SOURCE)
    panel = panel.no_value(empty)
    return panel.links([_runbook(f"{ALERTS}{name}") for name in runbooks.split()])


def _runbook(alert: str) -> grid.DashboardLink:
    link = grid.DashboardLink(f"Runbook: {alert}").type(models.DashboardLinkType.LINK)
    return link.url(f"{RUNBOOKS}/{alert}.md").target_blank(True)


def at_the_end(ref: str, expression: str, legend: str = "") -> prometheus.Dataquery:
    """A query for the end of the time range: one value, or none, but never an older one."""
    return _query(ref, expression, legend).instant()


def over_time(ref: str, expression: str, legend: str) -> prometheus.Dataquery:
    """A query for the whole time range. Where it reads buckets, with exemplars: a point that leads to its trace."""
    return _query(ref, expression, legend).range().exemplar("_bucket{" in expression)


def _query(ref: str, expression: str, legend: str) -> prometheus.Dataquery:
    return prometheus.Dataquery().ref_id(ref).expr(expression).legend_format(legend).datasource(DATA_SOURCE)


def thresholds(limits: Limits) -> grid.ThresholdsConfig:
    """Limits as Grafana wants them."""
    steps = [models.Threshold(value, colour) for value, colour in limits]
    return grid.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


def setting(name: str, value: object) -> models.DynamicConfigValue:
    """One setting of an override."""
    return models.DynamicConfigValue(id_val=name, value=value)


def coloured(legends: Iterable[str]) -> dict[str, str]:
    """The colours of the names that a panel with these legends may show."""
    labels = [label for metric in METRICS for label in metric.labels]
    values = {
        legend: [value for label in labels if legend == f"{{{{{label.name}}}}}" for value in label.values] for legend in legends
    }
    shown = [name for legend, found in values.items() for name in found or [legend]]
    return {name: COLOURS[name] for name in shown if name in COLOURS}


def legend(place: common.LegendPlacement, calcs: Sequence[str]) -> widgets.VizLegendOptions:
    """A table of what each series came to, the worst first."""
    shown = widgets.VizLegendOptions().show_legend(True).display_mode(common.LegendDisplayMode.TABLE).placement(place)
    return shown.calcs(list(calcs)).sort_by(calcs[-1].capitalize()).sort_desc(calcs[-1] == "max")


def plain_legend() -> widgets.VizLegendOptions:
    """The names under the panel."""
    shown = widgets.VizLegendOptions().show_legend(True).display_mode(common.LegendDisplayMode.LIST)
    return shown.placement(common.LegendPlacement.BOTTOM)


def tooltip() -> widgets.VizTooltipOptions:
    """All series of a moment, the largest first."""
    return widgets.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING)
