"""A whole server under a Ray of its own, ended in the wrong moment or by force. `tests/system` has its better days."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.checkpoints import make_idefics3
from tests.cluster.up_server import PATIENCE_S, START_S, Home, UpServer, alive, is_free, new_home
from tests.real_processes import free_port, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_idefics3(tmp_path_factory.mktemp("model"))


@pytest.fixture
def home() -> Iterator[Home]:
    with new_home() as made:
        yield made


@pytest.fixture
def up(home: Home, model: Path) -> Iterator[UpServer]:
    server = UpServer(home, model)
    yield server
    server.close()


def test_down_removes_what_a_killed_supervisor_left(up: UpServer) -> None:
    state = up.wait_ready()
    processes = up.processes()
    actors = up.pids("controller", "gateway", "worker", "vision_worker")
    assert len(actors) == 4
    assert actors < {process.pid for process in processes}
    up.process.kill()
    up.process.wait()
    assert up.home.airside("down", "--port", str(up.port)).returncode == 0
    assert up.left(state) == []
    assert alive(processes) == []


def test_stopped_while_starting_it_leaves_nothing(up: UpServer) -> None:
    wait_until(lambda: up.home.states.read(up.port) is not None, PATIENCE_S, "the state file")
    state = up.state()
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(PATIENCE_S) == 0, up.text()
    assert up.left(state) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_while_ray_starts_it_leaves_nothing(up: UpServer, number: signal.Signals) -> None:
    def ray_is_starting() -> bool:
        with suppress(psutil.NoSuchProcess):
            return any(process.name() == "gcs_server" for process in up.processes())
        return False

    wait_until(ray_is_starting, PATIENCE_S, "Ray's first process")
    state = up.state()
    up.process.send_signal(number)
    assert up.process.wait(PATIENCE_S) == 0, up.text()
    assert up.left(state) == []


def test_a_rank_that_cannot_load_is_the_last_line_with_its_cause(home: Home, model: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(model, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    port = free_port()
    result = home.airside("up", str(home.write_config(broken, port)), timeout_s=START_S)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("worker-0 ended while the server was starting: exit status 1: ")
    assert "model.safetensors" in last
    assert home.states.all() == []
    assert is_free(port)
