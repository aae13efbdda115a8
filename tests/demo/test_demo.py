"""`airside demo` against a stand-in server: what it shows, what it calls a failure, and that it always cleans up."""

from __future__ import annotations

import functools
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from airside.cluster.demo import demo
from airside.cluster.demo import screen as demo_screen
from airside.cluster.demo.exchange import Exchange
from airside.cluster.demo.screen import Screen
from airside.cluster.demo.server import DemoServer
from airside.cluster.demo_model.exhibits import exhibits
from airside.proto import airside_pb2 as pb
from tests.real_processes import free_port

FAKE_SERVER = Path(__file__).parent / "fake_server.py"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    port = free_port()
    path = tmp_path / "config.yaml"
    path.write_text(f"model:\n  source: demo\nserver:\n  grpc:\n    host: 127.0.0.1\n    port: {port}\n")
    return path


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def choose(mode: str) -> None:
        monkeypatch.setattr(demo, "resolve", lambda *_: Path("/nowhere"))  # the stand-in needs no model
        command = (sys.executable, str(FAKE_SERVER), mode)
        monkeypatch.setattr(demo, "DemoServer", functools.partial(DemoServer, command=command))

    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)  # pytest's own handlers stay
    return choose


def is_listening(config: Path) -> bool:
    port = int(config.read_text().rpartition(":")[2])
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_whole_demo(config: Path, serve: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    serve("good")
    assert demo.run(config, keep=False) == 0
    out = capsys.readouterr().out
    assert f"{len(exhibits())} of {len(exhibits())} answers about held-out pictures are right" in out
    assert out.index("scaled to 3") < out.index("scaled to 1")
    assert "stopped in order" in out
    assert "story went on" in out
    assert "text 1" in out
    assert "It is Paris." in out
    assert "vision-2: " in out
    starting = out[out.index("asked for 3 vision workers") : out.index("3 vision workers after")]
    assert "story 1 > once" in starting, "tokens are shown as they come"
    assert re.search(r"story 1 +abort +", out), "the story is in the table"
    assert not is_listening(config)


@pytest.mark.parametrize(
    ("mode", "line"),
    [
        ("misreads", "failed: only 0 answers about pictures were right"),
        pytest.param("uneven", "failed: vision worker vision-1 got no picture", marks=pytest.mark.slow),
        pytest.param(
            "stalls", "failed: the story stood still while the vision workers changed", marks=pytest.mark.slow
        ),
        ("dies", "failed: the server ended with exit code -9: out of memory"),
        ("refuses", "failed: the story did not start: RESOURCE_EXHAUSTED: queue full"),
        ("broken", "failed: the server ended with exit code 1: cannot start: no such device"),
    ],
)
def test_failures_are_one_clear_line(
    config: Path, serve: Callable[[str], None], capsys: pytest.CaptureFixture[str], mode: str, line: str
) -> None:
    serve(mode)
    assert demo.run(config, keep=False) == 1
    assert line in capsys.readouterr().out
    assert not is_listening(config)


def test_another_server_on_the_port_is_left_alone(
    config: Path, serve: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    serve("good")
    with socket.socket() as other:
        other.bind(("127.0.0.1", int(config.read_text().rpartition(":")[2])))
        other.listen()
        assert demo.run(config, keep=False) == 1
    assert "is in use" in capsys.readouterr().out


def test_bad_config_and_missing_model_are_named(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)
    config.write_text("model:\n  source: no-such-model\n")
    assert demo.run(config, keep=True) == 1
    assert "failed: model.source: 'no-such-model'" in capsys.readouterr().out
    assert demo.run(config, keep=False) == 1
    assert "set model.source to demo" in capsys.readouterr().out
    config.write_text("modle: {}\n")
    assert demo.run(config, keep=False) == 1
    assert "did you mean model" in capsys.readouterr().out


def test_kept_server_prints_lines_to_copy_and_goes_on_interrupt(config: Path) -> None:
    script = (
        "import sys, functools; from pathlib import Path; from airside.cluster.demo import demo, server\n"
        f"command = (sys.executable, {str(FAKE_SERVER)!r}, 'good')\n"
        "demo.resolve = lambda *_: None\n"
        "demo.DemoServer = functools.partial(server.DemoServer, command=command)\n"
        f"sys.exit(demo.run(Path({str(config)!r}), keep=True))"
    )
    with subprocess.Popen([sys.executable, "-u", "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen: list[str] = []
        for line in process.stdout:
            seen.append(line)
            if " generate --address " in line:
                break
        assert Path(line.split()[0]).name == "airside"
        assert any("grpcurl -plaintext" in line for line in seen)
        process.terminate()
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "failed" not in rest
    assert not is_listening(config)


def test_speed_is_taken_after_the_first_token() -> None:
    exchange = Exchange("x", "?", num_tokens=5, sent_at=10.0, token_times=[12.0, 13.0, 16.0])
    assert exchange.time_to_first_token_s == 2.0
    assert exchange.tokens_per_s == 1.0
    assert exchange.longest_pause_s == 3.0
    assert Exchange("x", "?").tokens_per_s is None


def test_terminal_shows_the_end_of_a_growing_reply_and_the_beginning_of_a_finished_one() -> None:
    exchange = Exchange("x", "?", text="one two three four")
    assert demo_screen.window(exchange, 10) == "…hree four"
    exchange.finished = pb.Finished(reason="stop")
    assert demo_screen.window(exchange, 10) == "one two t…"
    assert demo_screen.window(exchange, 18) == "one two three four"


def test_aborted_request_is_not_ok() -> None:
    assert not Exchange("x", "?", finished=pb.Finished(reason="abort")).ok
    assert Exchange("x", "?", finished=pb.Finished(reason="length")).ok


def test_actors_routine_is_left_out_and_their_warnings_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.server_news("(ControllerActor pid=7) 2026-01-01 INFO airside.controller controller_up")
    screen.server_news("(WorkerActor pid=8) 2026-01-01 WARNING worker-0 short of memory")
    screen.server_news("(raylet) A worker died or was killed. Worker exit detail: The process receives a SIGTERM.")
    screen.server_news("(raylet) A worker died or was killed. Worker exit detail: The memory ran out.")
    screen.server_news("loading weights on 1 rank")
    out = capsys.readouterr().out
    assert "controller_up" not in out
    assert "SIGTERM" not in out
    assert "short of memory" in out
    assert "memory ran out" in out
    assert "loading weights" in out
