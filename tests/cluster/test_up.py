"""A whole server under a Ray of its own: it serves, heals, scales, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from airside.cluster.client import Client, Options
from airside.cluster.leftovers import processes_of
from airside.cluster.run_state import RunStates, ServerState
from tests.checkpoints import make_idefics3

pytestmark = pytest.mark.slow

START_S = 120.0
PATIENCE_S = 60.0


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, f"still not after {timeout_s:.0f} s: {what}"
        time.sleep(0.05)


class Up:
    """`airside up` as a child process, with state files of its own."""

    def __init__(self, folder: Path, model: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        config = {
            "model": {"source": str(model)},
            "engine": {"kv_cache_memory": "4MiB", "max_num_seqs": 8, "num_threads": 1},
            "vision": {"actor_options": {"num_cpus": 0.25}, "arena": "16MiB"},
            "server": {"grpc": {"port": self.port}, "shutdown_timeout_s": 5},
        }
        self.config_file = folder / "a.yaml"
        self.config_file.write_text(yaml.safe_dump(config))
        self.environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
        self.states = RunStates(folder / "airside")
        self.log = (folder / "log").open("w+")
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-m", "airside.cluster.cli", "up", str(self.config_file)],
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env=self.environment,
            start_new_session=True,
        )
        self.client = Client(f"127.0.0.1:{self.port}")

    def wait_ready(self) -> ServerState:
        def ready() -> bool:
            assert self.process.poll() is None, self.text()
            state = self.states.read(self.port)
            return state is not None and state.is_ready

        wait_until(ready, START_S, "the server is ready")
        state = self.states.read(self.port)
        assert state is not None
        return state

    def text(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def pids(self, *roles: str) -> set[int]:
        rows = self.client.list_workers().workers
        return {row.pid for row in rows if row.role in roles and row.state != "lost"}

    def is_ready(self) -> bool:
        return self.client.info().state == "ready"

    def vision_workers(self) -> list[str]:
        rows = self.client.list_workers().workers
        return [row.name for row in rows if row.role == "vision_worker" and row.state in ("ready", "busy")]

    def tokens(self) -> list[int]:
        events = self.client.generate("The small red", options=Options(max_tokens=6, temperature=0.0), timeout_s=30)
        return [token for event in events for token in event.delta.token_ids]

    def left(self, state: ServerState) -> list[str]:
        processes = [str(process.pid) for process in processes_of(Path(state.run_dir))]
        segments = [path.name for path in Path("/dev/shm").glob(f"{state.run.segment_prefix}*")]
        files = [path for path in (state.run_dir, self.states.base / f"{self.port}.json") if Path(path).exists()]
        return [*processes, *segments, *map(str, files)]

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        subprocess.run(
            [sys.executable, "-m", "airside.cluster.cli", "down", "--all"], env=self.environment, check=True, timeout=60
        )
        self.log.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_idefics3(tmp_path_factory.mktemp("model"))


@pytest.fixture
def up(model: Path) -> Iterator[Up]:
    folder = Path(tempfile.mkdtemp(prefix="as", dir="/tmp"))  # short: Ray's sockets have to fit under it
    server = Up(folder, model)
    yield server
    server.close()
    shutil.rmtree(folder)


def test_it_serves_heals_scales_and_leaves_nothing(up: Up) -> None:
    state = up.wait_ready()
    before = up.tokens()
    assert len(before) == 6
    others = up.pids("controller", "gateway", "vision_worker")
    assert len(others) == 3

    (lost,) = up.pids("worker")
    os.kill(lost, signal.SIGKILL)
    wait_until(lambda: bool(up.pids("worker") - {lost}) and up.is_ready(), PATIENCE_S, "a new rank")
    assert up.tokens() == before
    assert up.pids("controller", "gateway", "vision_worker") == others

    assert up.client.scale_vision(2) == 2
    wait_until(lambda: len(up.vision_workers()) == 2, PATIENCE_S, "two vision workers")
    assert up.client.scale_vision(1) == 1
    wait_until(lambda: up.vision_workers() == ["vision-0"], PATIENCE_S, "the older one alone")

    (lost,) = up.pids("vision_worker")
    os.kill(lost, signal.SIGKILL)
    wait_until(lambda: up.vision_workers() == ["vision-2"], PATIENCE_S, "one in its place")

    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(PATIENCE_S) == 0, up.text()
    assert up.left(state) == []


def test_down_removes_what_a_killed_supervisor_left(up: Up) -> None:
    state = up.wait_ready()
    actors = up.pids("controller", "gateway", "worker", "vision_worker")
    assert len(actors) == 4
    up.process.kill()
    up.process.wait()
    command = [sys.executable, "-m", "airside.cluster.cli", "down", "--port", str(up.port)]
    subprocess.run(command, env=up.environment, check=True, timeout=60)
    assert up.left(state) == []
    assert not any(psutil.pid_exists(pid) for pid in actors)


def test_stopped_while_starting_it_leaves_nothing(up: Up) -> None:
    wait_until(lambda: up.states.read(up.port) is not None, PATIENCE_S, "the state file")
    state = up.states.read(up.port)
    assert state is not None
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(PATIENCE_S) == 0, up.text()
    assert up.left(state) == []
