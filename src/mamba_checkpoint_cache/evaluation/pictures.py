"""The pictures of a drift report, as SVG to be put into a page."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

Report = Mapping[str, Any]

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "drift",
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_COLOURS = ("#1f5fa8", "#c2571a", "#2f7d4f", "#8a3f8f", "#a33a3a", "#5d6b2a")
_LABELLED_HEADS = 100
_FLOOR_LINES = {"rechunk": ((0, (1, 2)), "computed again in other chunks"), "bf16": ((0, (5, 3)), "bf16 checkpoints")}


def by_distance(report: Report) -> str:
    """Mean KL against tokens after one restore, with its interval, the noise floors and the budget."""
    figure, axes = _axes("tokens after the restore", "mean KL (nats)")
    for colour, (codec, task) in zip(_COLOURS, _series(report), strict=False):
        rows = [row for row in _lossy(report) if (row["codec"], row["task"], row["hops"]) == (codec, task, 1)]
        _line(axes, "distance", rows, label=f"{codec}, {task}", color=colour, marker="o")
    for source, (line, label) in _FLOOR_LINES.items():
        for i, task in enumerate(dict.fromkeys(row["task"] for row in report["noise"]["rows"])):
            rows = [row for row in report["noise"]["rows"] if (row["source"], row["task"]) == (source, task)]
            _line(axes, "distance", rows, label="" if i else label, color="#777777", linestyle=line, marker="")
    _finish(axes, report, "distance")
    return _svg(figure)


def by_hops(report: Report) -> str:
    """Mean KL over the tokens up to 16 after the last restore, against the number of restores."""
    figure, axes = _axes("restores, with 16 tokens run between two", "mean KL (nats)")
    for colour, (codec, task) in zip(_COLOURS, _series(report), strict=False):
        rows = [row for row in _lossy(report) if (row["codec"], row["task"], row["distance"]) == (codec, task, 16)]
        _line(axes, "hops", rows, label=f"{codec}, {task}", color=colour, marker="o")
    _finish(axes, report, "hops")
    return _svg(figure)


def by_head(report: Report, codec: str) -> str:
    """Relative state error of one restore, a row of squares per layer."""
    errors = [[100 * (error or 0.0) for error in layer] for layer in report["state_error"][codec]]
    layers, heads, largest = len(errors), len(errors[0]), max(map(max, errors)) or 1.0
    with mpl.rc_context(_STYLE | {"axes.grid": False}):
        figure = Figure(figsize=(7.5, min(10.0, 1.8 + 0.35 * layers)), layout="constrained")
        axes = figure.add_subplot(xlabel="head", ylabel="layer of the model")
        mesh = axes.pcolormesh(errors, cmap="Blues", vmin=0.0, vmax=largest, edgecolors="white", linewidth=0.5)
        axes.set_yticks([i + 0.5 for i in range(layers)], [str(layer) for layer in report["state"]["layers"]])
        if layers * heads <= _LABELLED_HEADS:
            for row, column in product(range(layers), range(heads)):
                error = errors[row][column]
                colour = "white" if error > 0.6 * largest else "black"
                axes.text(column + 0.5, row + 0.5, f"{error:.2f}", color=colour, ha="center", va="center", fontsize=9)
        apart = max(1, heads // 16)
        axes.set_xticks([i + 0.5 for i in range(0, heads, apart)], [str(i) for i in range(0, heads, apart)])
        axes.invert_yaxis()
        figure.colorbar(mesh, ax=axes, label="relative error (%)")
        return _svg(figure)


def memory_against_kl(report: Report) -> str:
    """A point per codec and task: bytes of a checkpoint, and mean KL over the 16 tokens after one restore."""
    figure, axes = _axes("KiB of one checkpoint, conv windows included", "mean KL (nats)")
    sixteen = [row for row in report["rows"] if (row["distance"], row["hops"]) == (16, 1)]
    sixteen += [row | {"codec": "bf16"} for row in report["noise"]["rows"] if (row["distance"], row["source"]) == (16, "bf16")]
    kl = [row["kl_mean"] for row in sixteen if row["kl_mean"]]
    bottom = min(kl, default=1e-6) / 10
    for marker, colour, task in zip("osD", _COLOURS, dict.fromkeys(row["task"] for row in sixteen), strict=False):
        for row in (row for row in sixteen if row["task"] == task and row["kl_mean"] is not None):
            size = report["capacity"][row["codec"]]["bytes_per_checkpoint"] / 1024
            zero = row["kl_mean"] == 0
            axes.plot(size, row["kl_mean"] or bottom, "v" if zero else marker, color=colour, markersize=8)
            axes.annotate(
                f"{row['codec']}, {task}{': 0' if zero else ''}",
                (size, row["kl_mean"] or bottom),
                xytext=(8, 4 if marker == "o" else -12),
                textcoords="offset points",
            )
    largest = max(capacity["bytes_per_checkpoint"] for capacity in report["capacity"].values()) / 1024
    axes.set_xlim(0, 1.4 * largest)
    axes.set_yscale("log")
    _budget(axes, report)
    return _svg(figure)


def _lossy(report: Report) -> list[Report]:
    return [row for row in report["rows"] if row["codec"] != "none"]


def _series(report: Report) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row["codec"], row["task"]) for row in _lossy(report)))


def _axes(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(7.5, 4.2), layout="constrained")
        return figure, figure.add_subplot(xlabel=xlabel, ylabel=ylabel)


def _line(axes: Axes, x: str, rows: Sequence[Report], **style: Any) -> None:
    """A log axis can't show 0, nor anything what is not finite: such points are left out."""
    rows = [row for row in rows if row["kl_mean"]]
    if rows:
        places = [row[x] for row in rows]
        axes.plot(places, [row["kl_mean"] for row in rows], markersize=4, **style)
        between = [row.get("kl_ci") for row in rows]
        if all(between):
            axes.fill_between(places, *zip(*between, strict=True), color=style["color"], alpha=0.15, linewidth=0)


def _finish(axes: Axes, report: Report, x: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({row[x] for row in report["rows"]})
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    _budget(axes, report)
    if axes.get_legend_handles_labels()[0]:
        axes.figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=10, handlelength=3)


def _budget(axes: Axes, report: Report) -> None:
    ceiling = report["verdict"]["budget"]["kl_nats"]
    if not axes.get_lines():
        axes.set_ylim(ceiling / 1000, 2 * ceiling)
    axes.axhline(ceiling, color="#a33a3a", linewidth=1)
    axes.annotate("budget", (1, ceiling), xycoords=("axes fraction", "data"), ha="right", va="bottom", color="#a33a3a")


def _svg(figure: Figure) -> str:
    """The picture alone: no declarations, and no metadata that name addresses."""
    text = io.StringIO()
    with mpl.rc_context(_STYLE):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = text.getvalue()
    return re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
