"""What a benchmark found: tables for people, the same and every sample as JSON."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from airside.cluster.bench.machine import Limits, cpu_name

Cell = str | int | float | None
Tell = Callable[[str], None]

_VERSIONS = ("airside", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its key in JSON, its heading, and how many digits a number has after the point."""

    key: str
    heading: str
    digits: int = 1


@dataclass(slots=True)
class Table:
    """Rows by the keys of their columns."""

    name: str
    columns: list[Column]
    rows: list[dict[str, Cell]] = field(default_factory=list)

    def add(self, **cells: Cell) -> None:
        """One more row; every key must be a column's."""
        unknown = cells.keys() - {column.key for column in self.columns}
        assert not unknown, f"no such columns in {self.name}: {unknown}"
        self.rows.append(cells)

    def texts(self) -> list[list[str]]:
        """The rows as they are shown."""
        return [[_text(row.get(column.key), column.digits) for column in self.columns] for row in self.rows]

    def markdown(self) -> str:
        """A table of GitHub's markdown; numbers to the right."""
        right = [self._is_numeric(column) for column in self.columns]
        lines = [[column.heading for column in self.columns], ["---:" if each else "---" for each in right]]
        return "\n".join(f"| {' | '.join(line)} |" for line in [*lines, *self.texts()])

    def rich(self) -> RichTable:
        """For a terminal."""
        table = RichTable(title=self.name, title_justify="left", title_style="bold")
        for column in self.columns:
            table.add_column(column.heading, justify="right" if self._is_numeric(column) else "left")
        for row in self.texts():
            table.add_row(*row)
        return table

    def _is_numeric(self, column: Column) -> bool:
        return all(not isinstance(row.get(column.key), str) for row in self.rows)


@dataclass(frozen=True, slots=True)
class Chart:
    """What of a table is worth drawing: bars of one column, or its lines over another."""

    table: str
    label: str
    """The column that names a bar; with `over`, a line."""
    value: str
    over: str | None = None


@dataclass(slots=True)
class Report:
    """All that one run has to say."""

    title: str
    settings: dict[str, Any]  # Any: what JSON takes
    tables: list[Table] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=dict)
    limits: Limits | None = None
    notes: list[str] = field(default_factory=list)

    def table(self, name: str) -> Table:
        """By its name."""
        return next(table for table in self.tables if table.name == name)

    def show(self, console: Console) -> None:
        """To a terminal as it draws tables, to anything else as markdown."""
        console.print(f"{self.title} on {cpu_name()}", style="bold", soft_wrap=True, highlight=False)
        for note in [*self.notes, *([limits_line(self.limits)] if self.limits else [])]:
            console.print(note, soft_wrap=True, highlight=False)
        for table in self.tables:
            if console.is_terminal:
                console.print(table.rich())
            else:
                print(f"\n{table.name}\n\n{table.markdown()}", file=console.file)

    def as_json(self) -> dict[str, Any]:  # Any: what JSON takes
        """Everything, every sample included."""
        limits = self.limits
        return {
            "title": self.title,
            "command": " ".join(sys.argv),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "machine": {"cpu": cpu_name(), "system": platform.platform(), "python": platform.python_version()},
            "versions": {name: _version(name) for name in _VERSIONS},
            "settings": self.settings,
            "limits": limits and {"read_bytes_per_s": limits.read_bytes_per_s, "flop_per_s": limits.flop_per_s},
            "tables": {table.name: table.rows for table in self.tables},
            "samples": self.samples,
        }

    def write(self, path: Path) -> None:
        """The JSON file; its folder is made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.as_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def limits_line(limits: Limits) -> str:
    """The machine's limits in words."""
    return (
        f"limits measured in this run: {limits.read_bytes_per_s / 1e9:.1f} GB/s read, "
        f"{limits.flop_per_s / 1e9:,.0f} GFLOP/s multiplied"
    )


def _text(value: Cell, digits: int) -> str:
    if value is None:
        return ""
    return f"{value:,.{digits}f}" if isinstance(value, float) else str(value)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
