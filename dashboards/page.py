"""A dashboard: what all of them share is here, what each shows in its own module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from grafana_foundation_sdk.builders import dashboard as grid
from grafana_foundation_sdk.models import dashboard as models

from dashboards.look import DATA_SOURCE
from dashboards.panels import Panel
from mamba_checkpoint_cache.telemetry.catalogue import PREFIX

TAG = "mamba-checkpoint-cache"
ALL = models.VariableOption(selected=True, text=["All"], value=["$__all"])
CHAIN = {"job": "", "instance": 'job=~"$job"', "cache": 'job=~"$job", instance=~"$instance"'}
"""The variables, and what narrows the values of each."""


class Page(NamedTuple):
    """One dashboard: rows of panels by title."""

    uid: str
    title: str
    description: str
    rows: Mapping[str, Sequence[Panel]]

    def build(self) -> models.Dashboard:
        """The dashboard in Grafana's classic schema, with ids counted from 1."""
        board = grid.Dashboard(self.title).uid(self.uid).description(self.description).tags([TAG]).editable()
        board = board.time("now-1h", "now").refresh("30s").timezone("browser").tooltip(models.DashboardCursorSync.CROSSHAIR)
        board = board.variables([_data_source(), *map(_variable, CHAIN)]).link(_siblings())
        for title, panels in self.rows.items():
            board = board.with_row(grid.Row(title))
            for panel in panels:
                board = board.with_panel(panel)
        built = board.build()
        for number, placed in enumerate(built.panels or [], start=1):
            placed.id_val = number
        return built


def _data_source() -> grid.DatasourceVariable:
    current = models.VariableOption(text="default", value="default")
    return grid.DatasourceVariable("datasource").label("Data source").type("prometheus").current(current)


def _variable(name: str) -> grid.QueryVariable:
    narrowed = f"{PREFIX}_info{{{CHAIN[name]}}}" if CHAIN[name] else f"{PREFIX}_info"
    query: dict[str, object] = {"query": f"label_values({narrowed}, {name})", "refId": name}
    variable = grid.QueryVariable(name).label(name.capitalize()).datasource(DATA_SOURCE).query(query).multi(True)
    variable = variable.include_all(True).current(ALL).sort(models.VariableSort.ALPHABETICAL_ASC)
    return variable.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)


def _siblings() -> grid.DashboardLink:
    link = grid.DashboardLink("The other dashboards").type(models.DashboardLinkType.DASHBOARDS).tags([TAG])
    return link.include_vars(True).keep_time(True).placement("")
