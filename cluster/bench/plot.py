"""A report as a picture, with matplotlib, which is installed with the extra `bench`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from airside.cluster.bench.report import Chart, Report, Table

_SUFFIXES = (".pdf", ".png", ".svg")
_INCHES_WIDE = 8.0
_INCHES_PER_BAR = 0.28
_INCHES_AROUND = 1.4


class PlotUnavailable(Exception):
    """There is no matplotlib, or no such kind of file; the message says what to do."""


def check_can_plot(path: Path) -> None:
    """Before anything is measured. Raises PlotUnavailable."""
    if path.suffix not in _SUFFIXES:
        raise PlotUnavailable(f"--plot draws files that end in .pdf, .png or .svg, not {path.name}")
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotUnavailable("--plot needs matplotlib: pip install matplotlib, or leave --plot out")


def plot(report: Report, path: Path) -> None:
    """Draws the report's charts, one below the other. Raises PlotUnavailable; ValueError when it has none."""
    check_can_plot(path)
    if not report.charts:
        raise ValueError(f"{report.title} has nothing to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [_height(report.table(chart.table), chart) for chart in report.charts]
    figure = Figure(figsize=(_INCHES_WIDE, sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(report.charts), 1, squeeze=False, height_ratios=heights)
    for (axis,), chart in zip(axes, report.charts, strict=True):
        _draw(axis, report.table(chart.table), chart)
    figure.suptitle(report.title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _height(table: Table, chart: Chart) -> float:
    return 4.0 if chart.over else _INCHES_AROUND + _INCHES_PER_BAR * len(table.rows)


def _draw(axis: Any, table: Table, chart: Chart) -> None:  # Any: matplotlib's Axes
    from matplotlib import colormaps

    headings = {column.key: column.heading for column in table.columns}
    rows = [row for row in table.rows if row.get(chart.value) is not None]
    axis.set_title(table.name, fontsize="medium")
    if not rows:  # as where no limit is known
        axis.text(0.5, 0.5, f"{headings[chart.value]}: not known", ha="center", transform=axis.transAxes)
        axis.set_axis_off()
        return
    if chart.over is None:
        labels = [str(row[chart.label]) for row in rows]
        axis.barh(range(len(rows)), [row[chart.value] for row in rows])
        axis.set_yticks(range(len(rows)), labels)
        axis.invert_yaxis()
        axis.set_xlabel(headings[chart.value])
    else:
        axis.set_prop_cycle(color=colormaps["tab20"](range(20)))
        for label in dict.fromkeys(row[chart.label] for row in rows):
            line = [row for row in rows if row[chart.label] == label]
            axis.loglog([row[chart.over] for row in line], [row[chart.value] for row in line], marker="o", label=label)
        axis.set_xlabel(headings[chart.over])
        axis.set_ylabel(headings[chart.value])
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
