"""How `benchmarks/compare.py` talks to an engine in a process of its own, with one that is made up."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from airside.cluster.bench.streams import TargetError
from airside.cluster.config.file import load_config
from airside.workers.model_config import load_model_config
from tests.bench.scripted_openai import Script, scripted_openai
from tests.checkpoints import make_gemma3, make_idefics3, make_llama, make_llava, make_qwen2_5_vl
from tests.real_processes import wait_until

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

ENGINE = """
import os, subprocess, sys, time
sys.path.insert(0, {peers!r})
import wire

def load(model, threads, options):
    print("what an engine prints is no answer")
    if model == "damaged":
        sys.exit("cannot read this model")
    if model == "hangs":
        time.sleep(600)
    if model == "leaves one behind":
        print("pid", subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)

    def generate(prompts, num_tokens):
        if model == "dies":
            os._exit(1)
        wire.check_lengths([len(prompt) for prompt in prompts], num_tokens)
        return options["seconds"] * len(prompts)

    return generate

wire.main(lambda: True, load)
"""


@contextmanager
def imported(folder: Path, name: str) -> Iterator[ModuleType]:
    """A module of a folder that is no package; afterwards neither it nor what it imported from there is left."""
    known = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield importlib.import_module(name)
    for module in set(sys.modules) - known:
        if Path(getattr(sys.modules[module], "__file__", None) or "/").is_relative_to(BENCHMARKS):
            del sys.modules[module]


@pytest.fixture
def compare() -> Iterator[ModuleType]:
    with imported(BENCHMARKS, "compare") as module:
        yield module


@pytest.fixture
def peer() -> Iterator[ModuleType]:
    with imported(BENCHMARKS, "peer") as module:
        yield module


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


def test_one_that_hangs_is_killed(peer: ModuleType, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(peer.PeerFailed, match="made up did not answer within 1 s"):
        peer.RunningPeer("made up", command(tmp_path, "hangs"), tmp_path / "log", answer_s=1.0)
    assert time.monotonic() - began < 20


def test_one_that_dies_has_failed_ever_after(peer: ModuleType, tmp_path: Path) -> None:
    running = peer.RunningPeer("made up", command(tmp_path, "dies"), tmp_path / "log")
    for _ in range(2):  # while it answers, and when nobody reads any more
        with pytest.raises(peer.PeerFailed, match="made up ended"):
            running.generate([[1, 2]] * 10_000, 2)
    with pytest.raises(peer.PeerFailed, match="made up ended"):
        running.peak_rss_bytes()
    running.close()
    running.close()


def test_what_an_engine_leaves_behind_is_killed(peer: ModuleType, tmp_path: Path) -> None:
    running = peer.RunningPeer("made up", command(tmp_path, "leaves one behind"), tmp_path / "log")
    left = int((tmp_path / "log").read_text().split("pid ")[1].split()[0])
    assert psutil.pid_exists(left)
    running.close()
    wait_until(lambda: not is_running(left), 20, "the child of an engine has ended")


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_every_peer_has_a_script(peer: ModuleType, tmp_path: Path) -> None:
    assert len({each.name for each in peer.PEERS}) == len(peer.PEERS) == 6
    for each in peer.PEERS:
        assert (peer.SCRIPTS / each.script).is_file()
        assert each.is_installed(tmp_path) == (not each.has_environment)
    wanted = {each.name: each.has_precision("int8") for each in peer.PEERS}
    assert wanted == {
        "Airside": True,
        "transformers": False,
        "llama.cpp": True,
        "openvino": True,
        "vllm": False,
        "ctranslate2": True,
    }
    assert all(each.has_precision("bfloat16") for each in peer.PEERS)


@pytest.mark.parametrize("script", sorted(path.name for path in (BENCHMARKS / "peers").glob("run_*.py")))
def test_a_script_runs_without_its_engine(script: str) -> None:
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "peers" / script, "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode in (0, 1), done.stdout, done.stderr) == (True, "", "")


def test_the_server_of_openvino_imports_without_it() -> None:
    with imported(BENCHMARKS / "peers", "openvino_server") as server:
        assert callable(server.main)
    assert not sys.modules.keys() & {"openvino_server", "run_openvino", "wire"}


def test_options_of_airside_are_keys_of_their_blocks() -> None:
    options = {"dtype": "float32", "quantization": "int8", "max_model_len": 100, "max_num_seqs": 3, "strict_fifo": True}
    with imported(BENCHMARKS / "peers", "run_airside") as script:
        words = script.serve_command("1e3", 2, 4321, options)
    assert words.count("--set") == 5 + len(options)
    overrides = [word for before, word in itertools.pairwise(words) if before == "--set"]
    config = load_config(Path(words[words.index("up") + 1]), {}, overrides)
    assert (config.model.source, config.engine.num_threads, config.server.grpc.port) == ("1e3", 2, 4321)
    assert (config.model.dtype, config.model.quantization, config.model.max_model_len) == ("float32", "int8", 100)
    assert (config.engine.max_num_seqs, config.engine.strict_fifo) == (3, True)
    assert not config.engine.enable_prefix_caching


def test_the_ratio_is_to_the_best_of_the_others(compare: ModuleType) -> None:
    rate, time_ms = compare.figures.DECODE, compare.figures.FIRST_TOKEN
    assert compare.ratio_to_best(rate, {"Airside": 30.0, "a": 10.0, "b": 20.0}) == 1.5
    assert compare.ratio_to_best(time_ms, {"Airside": 30.0, "a": 15.0, "b": 20.0}) == 0.5
    assert compare.ratio_to_best(rate, {"Airside": 30.0}) is None
    assert compare.ratio_to_best(rate, {"a": 30.0}) is None
    assert [compare.turns(["a", "b", "c"], number) for number in (0, 1)] == [["a", "b", "c"], ["b", "c", "a"]]


def test_nobody_is_called_that(compare: ModuleType) -> None:
    assert compare.names_of("vllm,openvino") == ["vllm", "openvino"]
    assert compare.names_of(None) is None
    with pytest.raises(SystemExit, match=r"no peer is called llamacpp; there are Airside, .*llama\.cpp"):
        compare.names_of("vllm,llamacpp")


def contest(compare: ModuleType, folder: Path, **options: Any) -> Any:
    load = compare.replace(compare.figures.QUICK, rounds=2)
    served = compare.replace(compare.SERVE_QUICK, rounds=2)
    config = load_model_config(make_llama(folder / "llama"))
    return compare.Contest(folder, folder, "bfloat16", load, served, options, config)


class FakeEngine:
    """Fails in its second round if it is told to."""

    def __init__(self, name: str, *_: object) -> None:
        self.name = name
        self.num_calls = 0
        self.is_closed = False

    def generate(self, *_: object) -> float:
        self.num_calls += 1
        if self.name == "fails" and self.num_calls > 5:
            raise BrokenPipeError("it is gone")
        return 1.0

    def peak_rss_bytes(self) -> int:
        return 2**20

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(
    ("options", "model"), [({}, "text"), ({"quantization": "int8"}, "text"), ({"quantization": "gguf"}, "int4.gguf")]
)
def test_airside_reads_a_file_of_blocks_where_it_is_to_use_them_as_they_are(
    compare: ModuleType, tmp_path: Path, options: dict[str, str], model: str
) -> None:
    held = compare.replace(contest(compare, tmp_path, **options), precision="int4")
    ours, llama_cpp = (next(peer for peer in compare.PEERS if peer.name == name) for name in ("Airside", "llama.cpp"))
    assert held.model_of(ours) == tmp_path / model
    assert held.model_of(llama_cpp) == tmp_path / "int4.gguf"


def test_an_engine_that_fails_is_left_out_and_the_others_go_on(
    compare: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[FakeEngine] = []

    def start(name: str, *_: object) -> FakeEngine:
        started.append(FakeEngine(name))
        return started[-1]

    monkeypatch.setattr(compare, "RunningPeer", start)
    ours, other = compare.PEERS[0], compare.replace(compare.PEERS[1], name="fails")
    held = contest(compare, tmp_path, quantization="int8")
    compare.measure_engines(held, [ours, other], tmp_path)
    counts = {name: len(values) for name, values in held.samples[compare.figures.FIRST_TOKEN].items()}
    assert counts == {"Airside": 2, "fails": 1}
    assert held.samples[compare.MEMORY].keys() == {"Airside"}
    assert [engine.is_closed for engine in started] == [True, True]
    report = compare.make_report(held, [ours, other])
    assert "Airside (bfloat16, quantization int8) and peers (bfloat16)" in report.title
    assert "precision: Airside: bfloat16, quantization int8; fails: bfloat16" in report.notes
    assert any(note.startswith("fails has fewer than 2 rounds: first_token 1, decode 1") for note in report.notes)
    assert report.notes[-1] == "fails was left out: it is gone"
    assert json.loads(json.dumps(report.as_json()))["settings"]["left_out"] == {"fails": "it is gone"}


def test_a_server_that_fails_is_left_out_and_stopped(
    compare: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stopped: list[str] = []

    class Target:
        def __init__(self, name: str) -> None:
            self.name = name

    def start(_: object, peer: Any, *__: object) -> Any:
        if peer.name == "never up":
            raise compare.PeerFailed("never up's server is not up:\nlog")
        return compare.RunningServer(
            f"{peer.name}'s server", Target(peer.name), lambda: stopped.append(f"{peer.name} of {len(held.samples)}")
        )

    async def one_round(target: Target, _: object, seed: int) -> dict[str, float]:
        if target.name == "fails" and seed > 0:
            raise TargetError("no more")
        return dict.fromkeys(compare.SERVED, 1.0)

    monkeypatch.setattr(compare, "start_server", start)
    monkeypatch.setattr(compare, "one_round", one_round)
    ours = compare.PEERS[0]
    held = contest(compare, tmp_path)
    compare.measure_servers(
        held, [ours, *(compare.replace(ours, name=name) for name in ("fails", "never up"))], tmp_path
    )
    counts = [{name: len(values) for name, values in by.items()} for by in held.samples.values()]
    assert counts == [{"Airside": 2, "fails": 1}] * len(compare.SERVED)
    assert stopped[0].startswith("fails")
    assert "Airside of 5" in stopped
    assert held.left_out.keys() == {"never up's server", "fails's server"}


def test_an_answer_that_is_too_short_is_a_failure(compare: ModuleType) -> None:
    load = compare.replace(compare.SERVE_QUICK, vocab_size=512)
    with scripted_openai(Script()) as url:
        target = compare.HttpTarget(url)
        assert compare.asyncio.run(compare.one_round(target, load, 0))["output_per_s"] > 0
    with scripted_openai(Script(stops_after=3)) as url, pytest.raises(TargetError, match="8 tokens, one answer has 3"):
        compare.asyncio.run(compare.one_round(compare.HttpTarget(url), load, 0))


@pytest.mark.parametrize(("health", "is_ready"), [(200, True), (404, True), (503, False)])
def test_a_server_is_ready_when_its_health_says_so(peer: ModuleType, health: int, is_ready: bool) -> None:
    with scripted_openai(Script(health=health)) as url:
        assert peer.is_http_ready(int(url.rpartition(":")[2].partition("/")[0])) == is_ready


@pytest.mark.parametrize("make", [make_idefics3, make_llava, make_gemma3])
def test_the_text_part_of_a_model_with_pictures_is_written(make: Callable[[Path], Path], tmp_path: Path) -> None:
    source = make(tmp_path / "whole")
    with imported(BENCHMARKS, "text_model") as module:
        module.write_text_model(str(source), tmp_path / "text")
    whole, text = load_model_config(source), load_model_config(tmp_path / "text")
    assert (text.num_layers, text.hidden_size, text.vocab_size) == (
        whole.num_layers,
        whole.hidden_size,
        whole.vocab_size,
    )


def test_what_has_no_text_part_of_its_own_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with imported(BENCHMARKS, "text_model") as module:
        for source, why in [(make_qwen2_5_vl(tmp_path / "qwen"), "no text model of"), (tmp_path / "a.gguf", "a .gguf")]:
            with pytest.raises(module.TextModelError, match=why):
                module.write_text_model(str(source), tmp_path / "text")
    assert not (tmp_path / "text").exists()


def test_a_text_model_is_written_whole_and_known_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with imported(BENCHMARKS, "text_model") as module:
        source, folder = make_llama(tmp_path / "llama"), tmp_path / "models" / "text"
        module.text_model(str(source), folder)
        assert load_model_config(folder).hidden_size == load_model_config(source).hidden_size
        assert os.listdir(folder.parent) == ["text"]
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(module, "write_text_model", None)  # it is there
        module.text_model("llama", folder)
        with pytest.raises(module.TextModelError, match=r"is of .*/llama, not of owner/llama: move"):
            module.text_model("owner/llama", folder)
