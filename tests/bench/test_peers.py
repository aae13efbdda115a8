"""How `benchmarks/compare.py` talks to an engine in a process of its own, with one that is made up."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

ENGINE = """
import sys
sys.path.insert(0, {peers!r})
import wire

def load(model, threads, options):
    print("what an engine prints is no answer")
    if model == "damaged":
        sys.exit("cannot read this model")

    def generate(prompts, num_tokens):
        wire.check_lengths([len(prompt) for prompt in prompts], num_tokens)
        return options["seconds"] * len(prompts)

    return generate

wire.main(lambda: True, load)
"""


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("peer")


def command(folder: Path, model: str) -> list[str]:
    script = folder / "engine.py"
    script.write_text(ENGINE.format(peers=str(BENCHMARKS / "peers")))
    return [sys.executable, str(script), "--model", model, "--options", '{"seconds": 2.5}']


def test_an_engine_answers_with_its_own_time_and_memory(peer: ModuleType, tmp_path: Path) -> None:
    running = peer.RunningPeer("made up", command(tmp_path, "any"), tmp_path / "log")
    try:
        assert running.generate([[1, 2], [3, 4]], 2) == 5.0
        assert running.peak_rss_bytes() > 1_000_000
        with pytest.raises(peer.PeerFailed, match=r"made up: RuntimeError: asked for 3 tokens, made \[2\]"):
            running.generate([[1, 2]], 3)
        assert running.generate([[1, 2]], 2) == 2.5  # one that failed once goes on
    finally:
        running.close()
    assert "is no answer" in (tmp_path / "log").read_text()


def test_one_that_does_not_load_says_why(peer: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(peer.PeerFailed, match=r"(?s)made up ended:.*cannot read this model"):
        peer.RunningPeer("made up", command(tmp_path, "damaged"), tmp_path / "log")


def test_every_peer_has_a_script_that_runs_without_its_engine(peer: ModuleType, tmp_path: Path) -> None:
    assert len({each.name for each in peer.PEERS}) == len(peer.PEERS) == 6
    for each in peer.PEERS:
        assert (peer.SCRIPTS / each.script).is_file()
        assert each.is_installed(tmp_path) == (not each.has_environment)


def test_the_ratio_is_to_the_best_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    compare = importlib.import_module("compare")
    rate, time_ms = compare.figures.DECODE, compare.figures.FIRST_TOKEN
    assert compare.ratio_to_best(rate, {"Airside": 30.0, "a": 10.0, "b": 20.0}) == 1.5
    assert compare.ratio_to_best(time_ms, {"Airside": 30.0, "a": 15.0, "b": 20.0}) == 0.5
    assert compare.ratio_to_best(rate, {"Airside": 30.0}) is None
    assert compare.ratio_to_best(rate, {"a": 30.0}) is None
    assert [compare.turns(["a", "b", "c"], number) for number in (0, 1)] == [["a", "b", "c"], ["b", "c", "a"]]
