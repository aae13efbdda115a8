"""Percentiles, tables, JSON and pictures."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from airside.cluster.bench import plot as plots
from airside.cluster.bench.machine import Limits
from airside.cluster.bench.prompts import make_prompts
from airside.cluster.bench.report import Chart, Column, Report, Table
from airside.cluster.bench.samples import percentile


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
@pytest.mark.parametrize("percent", [0, 1, 50, 90, 99, 100])
def test_percentiles_are_numpys(count: int, percent: float) -> None:
    samples = np.random.default_rng(count).lognormal(size=count).tolist()
    assert percentile(samples, percent) == pytest.approx(np.percentile(samples, percent))


def test_of_nothing_there_is_no_percentile() -> None:
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 50)


def test_prompts_differ_and_come_again() -> None:
    prompts = make_prompts(20, 7, 512, seed=3)
    assert prompts == make_prompts(20, 7, 512, seed=3)
    assert len({tuple(prompt) for prompt in prompts}) == 20
    assert all(len(prompt) == 7 and 0 <= min(prompt) <= max(prompt) < 512 for prompt in prompts)
    assert not {tuple(p) for p in prompts} & {tuple(p) for p in make_prompts(20, 7, 512, seed=4)}


def report() -> Report:
    table = Table("Speed", [Column("name", "what"), Column("value", "tokens/s", 2), Column("none", "of the limit")])
    table.add(name="decode", value=1234.5678)
    table.add(name="prefill", value=0.5, none=1.0)
    return Report(
        "A report",
        {"rounds": 2},
        [table],
        [Chart("Speed", "name", "value")],
        {"decode": [1234.0, 1235.1]},
        Limits(2e9, 3e9),
        ["a note"],
    )


def test_elsewhere_than_on_a_terminal_it_is_markdown() -> None:
    shown = io.StringIO()
    report().show(Console(file=shown))
    assert "| decode | 1,234.57 |  |" in shown.getvalue()
    assert "| what | tokens/s | of the limit |\n| --- | ---: | ---: |" in shown.getvalue()
    assert "limits measured in this run: 2.0 GB/s read, 3 GFLOP/s" in shown.getvalue()
    assert "a note" in shown.getvalue()


def test_on_a_terminal_it_is_drawn() -> None:
    shown = io.StringIO()
    report().show(Console(file=shown, force_terminal=True, width=100))
    assert "1,234.57" in shown.getvalue()
    assert "|---" not in shown.getvalue()


def test_json_has_all_of_it(tmp_path: Path) -> None:
    report().write(tmp_path / "folder" / "a.json")
    content = json.loads((tmp_path / "folder" / "a.json").read_text())
    assert content["tables"]["Speed"][0] == {"name": "decode", "value": 1234.5678}
    assert content["samples"] == {"decode": [1234.0, 1235.1]}
    assert content["limits"] == {"read_bytes_per_s": 2e9, "flop_per_s": 3e9}
    assert content.keys() >= {"title", "command", "time", "machine", "versions", "settings"}


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plots.plot(report(), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_values_says_so(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    empty = report()
    empty.charts = [Chart("Speed", "name", "none")]
    empty.table("Speed").rows = [{"name": "decode", "value": 1.0, "none": None}]
    plots.plot(empty, tmp_path / "a.svg")
    assert "of the limit: not known" in (tmp_path / "a.svg").read_text()
    assert json.loads(json.dumps(empty.as_json()))["tables"]["Speed"][0]["none"] is None


def test_without_matplotlib_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(plots.PlotUnavailable, match="pip install matplotlib"):
        plots.check_can_plot(Path("a.png"))
