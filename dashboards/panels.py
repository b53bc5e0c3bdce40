"""The kinds of panel, one function each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from grafana_foundation_sdk.builders import common as widgets
from grafana_foundation_sdk.builders import dashboard as grid
from grafana_foundation_sdk.builders import heatmap, stat, statetimeline, table, timeseries, xychart
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import xychart as xychart_models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from dashboards.look import (
    NEUTRAL,
    Limits,
    at_the_end,
    coloured,
    finish,
    legend,
    over_time,
    plain_legend,
    setting,
    shaded,
    thresholds,
    tooltip,
)

Panel = Builder[models.Panel]
States = Sequence[tuple[str, str]]
"""What the numbers 0, 1, 2 … stand for: name and colour."""
HEIGHT = 9
REFS = "ABCDEFGH"
WHOLES = ("capacity", "pool")
"""What is no part of a stack, but what the parts are seen against: a dashed line. So is any ``ceiling``, in red."""
WHOLE_LOOK = (
    setting("custom.stacking", {"mode": "none"}),
    setting("custom.fillOpacity", 0),
    setting("custom.lineStyle", {"fill": "dash", "dash": [8, 8]}),
)
LEAST = {"percentunit": 0.01, "none": 1, "suffix:/s": 0.1, "suffix:/min": 1, "suffix:×": 2}
"""How far an axis reaches at least, by unit: nothing but zeros would otherwise be drawn up to 100."""


class Column(NamedTuple):
    """A column of a table, or an axis: what it shows, in which unit, and from where on that is bad."""

    title: str
    expression: str
    unit: str
    limits: Limits = NEUTRAL


def number(title: str, description: str, expression: str, *, unit: str, limits: Limits, empty: str, runbooks: str = "") -> Panel:
    """The value at the end of the time range, never an older one; ``empty`` says what it means that there is none."""
    return finish(_number(title, expression), title, description, unit, limits, runbooks, empty)


def state(title: str, description: str, expression: str, states: States, *, empty: str, runbooks: str) -> Panel:
    """As :func:`number`, of a state."""
    panel = _number(title, expression).mappings([_mapping(states)])
    return finish(panel, title, description, "none", _limits(states), runbooks, empty)


def _number(title: str, expression: str) -> stat.Panel:
    panel = stat.Panel().span(8).height(4).graph_mode(common.BigValueGraphMode.NONE).color_mode(common.BigValueColorMode.VALUE)
    panel = panel.text(widgets.VizTextDisplayOptions().value_size(40))
    panel = panel.reduce_options(widgets.ReduceDataOptions().calcs(["lastNotNull"]))
    return panel.with_target(at_the_end("A", expression, title))


def lines(
    title: str,
    description: str,
    queries: Mapping[str, str],
    *,
    unit: str,
    limits: Limits = NEUTRAL,
    runbooks: str = "",
    stacked: bool = False,
    log: bool = False,
    top: float | None = None,
    calcs: Sequence[str] = ("lastNotNull", "max"),
    width: int = 12,
) -> Panel:
    """Values over time, from 0 upwards; ``queries`` by legend. ``stacked`` ones are the parts of a whole."""
    long = any("{{instance}}" in name for name in queries)
    place = common.LegendPlacement.BOTTOM if long else common.LegendPlacement.RIGHT
    panel = timeseries.Panel().span(width).height(HEIGHT).tooltip(tooltip()).legend(legend(place, calcs))
    panel = panel.line_width(1 if stacked else 2).fill_opacity(40 if stacked else 0).show_points(common.VisibilityMode.AUTO)
    panel = panel.color_scheme(grid.FieldColor().mode(models.FieldColorModeId.PALETTE_CLASSIC))
    if len(limits) > 1:
        style = widgets.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.AREA)
        panel = panel.thresholds_style(style)
    if unit in LEAST:
        panel = panel.axis_soft_max(LEAST[unit])
    if stacked:
        panel = panel.stacking(widgets.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
    if log:
        panel = panel.scale_distribution(widgets.ScaleDistributionConfig().type(common.ScaleDistribution.LOG).log(10))
    else:
        panel = panel.min(0)
    if top is not None:
        panel = panel.max(top)
    for name, colour in coloured(queries).items():
        look = [setting("color", {"mode": "fixed", "fixedColor": colour}), *(WHOLE_LOOK if name in WHOLES else ())]
        panel = panel.override_by_name(name, look)
    if any(name.startswith("ceiling ") for name in queries):
        panel = panel.override_by_regexp("/^ceiling /", [setting("color", {"mode": "fixed", "fixedColor": "red"}), *WHOLE_LOOK])
    for ref, (name, expression) in zip(REFS, queries.items(), strict=False):
        panel = panel.with_target(over_time(ref, expression, name))
    return finish(panel, title, description, unit, shaded(limits), runbooks)


def spread(
    title: str, description: str, expression: str, *, unit: str, runbooks: str = "", width: int = 12, height: int = HEIGHT
) -> Panel:
    """How often each bucket of a histogram was met, over time."""
    panel = heatmap.Panel().span(width).height(height).calculate(False).cell_gap(1).show_legend()
    colour = heatmap.HeatmapColorOptions().mode(heatmap_models.HeatmapColorMode.SCHEME).scheme("Blues").exponent(0.5).steps(64)
    panel = panel.color(colour.fill("blue").reverse(False)).y_axis(heatmap.YAxisConfig().unit(unit))
    panel = panel.cell_values(heatmap.CellValues().unit("suffix:/s"))
    panel = panel.tooltip(heatmap.HeatmapTooltip().mode(common.TooltipDisplayMode.SINGLE).y_histogram(True))
    panel = panel.with_target(over_time("A", expression, "{{le}}").format(PromQueryFormat.HEATMAP))
    return finish(panel, title, description, unit, NEUTRAL, runbooks)


def timeline(title: str, description: str, queries: Mapping[str, str], states: States, *, runbooks: str) -> Panel:
    """A bar for each series, coloured by its state."""
    panel = statetimeline.Panel().span(12).height(HEIGHT).merge_values(True).row_height(0.8).fill_opacity(80).line_width(0)
    panel = panel.show_value(common.VisibilityMode.AUTO).legend(plain_legend()).mappings([_mapping(states)])
    panel = panel.color_scheme(grid.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
    for ref, (name, expression) in zip(REFS, queries.items(), strict=False):
        panel = panel.with_target(over_time(ref, expression, name))
    return finish(panel, title, description, "none", _limits(states), runbooks)


def rows_of(
    title: str, description: str, columns: Sequence[Column], names: Mapping[str, str], *, hidden: Sequence[str], runbooks: str
) -> Panel:
    """A table with a row for each set of labels; ``names`` are the titles of the labels, ``hidden`` what isn't shown."""
    panel = table.Panel().span(24).height(7).cell_height(common.TableCellHeight.SM).min_width(80)
    values = {f"Value #{ref}": column.title for ref, column in zip(REFS, columns, strict=False)}
    tidy = {
        "excludeByName": dict.fromkeys(["Time", *hidden], True),
        "indexByName": {name: place for place, name in enumerate([*names, *values])},
        "renameByName": {**names, **values},
    }
    panel = panel.transformations(_transformations(merge={}, organize=tidy))
    for ref, column in zip(REFS, columns, strict=False):
        look = [setting("unit", column.unit), setting("thresholds", thresholds(column.limits).build())]
        if len(column.limits) > 1:
            look.append(setting("custom.cellOptions", {"type": "color-text"}))
        panel = panel.override_by_name(column.title, look)
        panel = panel.with_target(at_the_end(ref, column.expression).format(PromQueryFormat.TABLE))
    return finish(panel, title, description, "none", NEUTRAL, runbooks, empty="-")


def scatter(title: str, description: str, x: Column, y: Column, *, by: str, runbooks: str) -> Panel:
    """A point for each set of labels, and a colour for each value of the label ``by``."""
    panel = xychart.Panel().span(12).height(10).show(xychart_models.XYShowMode.POINTS).fill_opacity(70)
    panel = panel.point_size(xychart.XychartFieldConfigPointSize().fixed(14)).mapping(xychart_models.SeriesMapping.AUTO)
    panel = panel.axis_label(y.title).min(0).legend(plain_legend()).tooltip(tooltip())
    panel = panel.color_scheme(grid.FieldColor().mode(models.FieldColorModeId.PALETTE_CLASSIC))
    split = {"fields": [by], "keepFields": False, "naming": {"asLabels": False}}
    panel = panel.transformations(_transformations(merge={}, partitionByValues=split))
    across = [setting("unit", x.unit), setting("custom.axisLabel", x.title), setting("min", 0), setting("max", 1)]
    panel = panel.override_by_name("Value #A", across)
    for ref, column in (("A", x), ("B", y)):
        panel = panel.with_target(at_the_end(ref, column.expression).format(PromQueryFormat.TABLE))
    return finish(panel, title, description, y.unit, y.limits, runbooks)


def _transformations(**options: Any) -> list[models.DataTransformerConfig]:
    return [models.DataTransformerConfig(id_val=name, options=value) for name, value in options.items()]


def _mapping(states: States) -> models.ValueMapping:
    shown = {str(i): models.ValueMappingResult(text=name, color=colour, index=i) for i, (name, colour) in enumerate(states)}
    return models.ValueMap(options=shown)


def _limits(states: States) -> Limits:
    return ((None, "text"), *((i, colour) for i, (_, colour) in enumerate(states)))
