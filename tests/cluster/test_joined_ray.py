"""`cluster.ray_address`: a Ray that others started is joined, waited for, and left as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.checkpoints import make_idefics3
from tests.cluster.ray_nodes import head_node
from tests.cluster.up_server import PATIENCE_S, START_S, Home, UpServer, alive, new_home
from tests.real_processes import free_port, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # two servers start, on a machine that may have other work


@pytest.fixture
def home() -> Iterator[Home]:
    with new_home() as made:
        yield made


@pytest.fixture
def ray_address() -> Iterator[str]:
    with head_node(num_cpus=1) as address:
        yield address


def test_it_serves_waits_for_room_and_leaves_ray_alone(home: Home, ray_address: str, tmp_path: Path) -> None:
    model = make_idefics3(tmp_path / "model")
    joined = (f"cluster.ray_address={ray_address}", "vision.actor_options.num_cpus=0")
    server = UpServer(home, model, joined)
    try:
        state = server.wait_ready()
        assert len(server.tokens()) == 6
        assert f"joining Ray at {ray_address}" in server.text()
        actors = server.pids("controller", "gateway", "worker", "vision_worker")
        processes = [process for process in psutil.process_iter() if process.pid in actors]
        assert len(processes) == 4
        assert home.airside("down").returncode == 0
        assert server.process.wait(PATIENCE_S) == 0, server.text()
        assert server.left(state) == []
        wait_until(lambda: alive(processes) == [], PATIENCE_S, "its actors are gone")
    finally:
        server.close()

    config = str(home.write_config(model, free_port()))
    settings = [*joined, "engine.tensor_parallel_size=2", "cluster.startup_timeout_s=15"]
    result = home.airside("up", config, *(word for each in settings for word in ("--set", each)), timeout_s=START_S)
    assert result.returncode == 1
    shortage = "2 CPU: 1 of 1 free on node"
    assert f"waiting for {shortage}" in result.stdout
    assert f"(cluster.startup_timeout_s): {shortage}" in result.stderr
