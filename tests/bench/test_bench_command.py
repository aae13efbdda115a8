"""`airside bench` as people run it, small and once, on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_llama
from tests.cluster.up_server import Home, new_home

pytestmark = pytest.mark.slow

RUN_S = 240.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("bench") / "llama")


@pytest.fixture
def home() -> Iterator[Home]:
    with new_home() as made:
        yield made


def run(home: Home, *arguments: str) -> tuple[str, dict[str, Any]]:
    """What was printed, and the JSON file."""
    path = home.folder / "a.json"
    done = home.airside("bench", *arguments, "--quick", "--json", str(path), timeout_s=RUN_S)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(path.read_text())


def test_offline(home: Home, model: Path) -> None:
    shown, found = run(home, "offline", "--model", str(model), "--set", "engine.num_threads=1", "--requests", "1,2")
    rows = {row["figure"]: row for row in found["tables"]["Speed"]}
    assert len(rows) == 4
    for row in rows.values():
        assert row["value"] > 0
        assert row["limit"] > 0
        assert row["of_limit"] > 0
    assert found["settings"]["options"] == {"num_threads": 1}
    assert {name: len(values) for name, values in found["samples"].items()} == dict.fromkeys(found["samples"], 1)
    memory = {row["process"]: row["mib"] for row in found["tables"]["Peak memory"]}
    assert memory.keys() > {"airside.controller", "airside.workers", "together"}
    assert len(memory) == 4
    assert memory["together"] == pytest.approx(sum(memory.values()) / 2)
    assert "| one request: decode |" in shown
    starts = found["tables"]["Start-up"]
    assert [row["start"] for row in starts] == ["weights packed anew", "as it is set"]
    for row in starts:
        assert row["ready"] > 0
        assert row["parts"].startswith("import ")
        assert "read " in row["parts"]


def test_step(home: Home, model: Path) -> None:
    _, found = run(home, "step", "--model", str(model), "--rows", "1,3")
    steps = found["tables"]["Steps"]
    assert [(row["kind"], row["rows"], row["tokens"]) for row in steps] == [
        ("decode", 1, 1),
        ("decode", 3, 3),
        ("prompt", 1, 32),
    ]
    assert all(0 < row["best_ms"] <= row["ms"] for row in steps)
    shares = found["tables"]["Where the time goes"]
    names = {row["operation"] for row in shares}
    assert names >= {"airside::paged_attention", "airside::linear", "between operations"}
    for step in ("1 x 1", "3 x 1", "1 x 32"):
        assert sum(row["share"] for row in shares if row["step"] == step) == pytest.approx(1, abs=0.05)


def test_drafts(home: Home, model: Path) -> None:
    shown, found = run(home, "drafts", "--model", str(model), "--set", "engine.drafts.max_tokens=3", "--rounds", "2")
    repeating, other = found["tables"]["Drafts, one request: decode, tokens/s"]
    for row in (repeating, other):
        assert row["plain"] > 0
        assert row["drafted"] > 0
        assert 0 < row["lowest"] <= row["ratio"]
        assert 0 <= row["accepted"] <= row["verified"]
        assert row["same"] == "yes"
    assert repeating["verified"] > 0
    assert found["settings"]["options"] == {"drafts": {"method": "ngram", "max_tokens": 3}}
    assert {len(values) for values in found["samples"].values()} == {2}
    assert "WRONG" not in shown


def test_the_quantization_is_named_and_changes_the_limits(home: Home, model: Path) -> None:
    shown, found = run(home, "step", "--model", str(model), "--rows", "1", "--set", "model.quantization=int8")
    assert "auto" not in found["title"]
    assert f"{found['settings']['dtype']}, quantization int8" in shown
    assert "limits: 8 bits a weight" in " ".join(shown.split())
    assert [row["kind"] for row in found["tables"]["Steps"]] == ["decode", "prompt"]
    assert all(row["of_limit"] is None or row["of_limit"] > 0 for row in found["tables"]["Steps"])


def test_kernels_of_quantised_weights(home: Home, model: Path) -> None:
    _, found = run(home, "kernels", "--model", str(model), "--rows", "1,3", "--set", "model.quantization=int8")
    assert "quantization int8" in found["title"]
    rows = found["tables"]["Operators"]
    assert all(row["us"] > 0 and row["gb_per_s"] > 0 for row in rows)
    assert all(row["of_limit"] > 0 for row in rows if row["operator"] == "paged_attention")


def test_kernels(home: Home, model: Path) -> None:
    _, found = run(home, "kernels", "--model", str(model), "--rows", "1,3")
    rows = found["tables"]["Operators"]
    assert {row["rows"] for row in rows} == {1, 3}
    assert {row["operator"] for row in rows} >= {"linear, head", "paged_attention", "sample"}
    assert all(row["us"] >= row["best_us"] > 0 and row["gb_per_s"] > 0 for row in rows)
    assert all(row["gflop_per_s"] > 0 and row["of_limit"] > 0 for row in rows if row["operator"].startswith("linear"))


def test_serve_starts_a_server_measures_and_stops_it(home: Home, model: Path) -> None:
    config = home.write_config(model, 50051)
    _, found = run(home, "serve", "--config", str(config), "--set", "engine.max_num_seqs=4")
    assert all(row["value"] > 0 for row in [*found["tables"]["Throughput"], *found["tables"]["Latency"]])
    assert len(found["samples"]["first_s"]) == 4
    assert home.states.all() == []


def test_a_step_that_the_engine_would_not_make_is_refused(home: Home, model: Path) -> None:
    for arguments, said in [
        (["--rows", "65"], "engine.max_num_seqs is 64, but a step of 65 x 1 tokens"),
        (["--chunk", "100", "--set", "engine.max_num_batched_tokens=99"], "engine.max_num_batched_tokens is 99, but"),
        (["--context", "60", "--set", "model.max_model_len=60"], "model.max_model_len is 60, but"),
    ]:
        done = home.airside("bench", "step", "--model", str(model), "--quick", *arguments)
        assert done.returncode == 2, done.stderr
        assert said in " ".join(done.stderr.split())


def test_what_makes_no_sense_is_refused(home: Home) -> None:
    for arguments, said in [
        (["serve"], "one of --target, --url and --config"),
        (["offline", "--requests", "1,none"], "numbers from 1 on"),
        (["offline", "--set", "num_threads"], "must be like"),
        (["step", "--plot", "a.doc"], "--plot draws files that end in .pdf, .png or .svg"),
        (["kernels", "--set", "engine.num_thread=1"], "engine.num_thread: Extra inputs are not permitted"),
        (["offline", "--set", "engine.block_size=none"], "engine.block_size: Input should be"),
        (["kernels", "--model", "no/such/thing"], "no such file or folder"),
    ]:
        done = home.airside("bench", *arguments)
        assert done.returncode == 2, done.stderr
        assert said in " ".join(done.stderr.replace("│", " ").split())
