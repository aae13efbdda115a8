"""Vision workers on another node of a Ray cluster than everything else: they work, they are lost, and others come.

Both nodes are on this machine, so that they could share memory. They must not.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import psutil
import pytest

from airside.cluster.client import Client
from airside.cluster.runs.run_state import ServerState
from airside.cluster.sampling_params import SamplingParams
from tests.checkpoints import make_idefics3
from tests.cluster.ray_nodes import further_node, head_node
from tests.cluster.up_server import PATIENCE_S, Home, UpServer, alive, new_home
from tests.real_processes import wait_until
from tests.system.local_server import LocalServer
from tests.system.picture_requests import picture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # two nodes start, on a machine that may have other work

ANSWER_S = 180.0  # until a node's loss is noticed, another has started, and its vision worker is up
NUM_TOKENS = 6
HEAD, OTHER, THIRD = "127.0.0.2", "127.0.0.3", "127.0.0.4"
PICTURES = [picture(300, 200, turn) for turn in range(0, 80, 10)]
ASKED = [*([data] for data in PICTURES), PICTURES[:3]]


@pytest.fixture
def home() -> Iterator[Home]:
    with new_home() as made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_idefics3(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """What a server on one node answers to each of the pictures, and to the first three together."""
    with LocalServer(model, engine={"num_threads": 1}) as server, Client(server.address) as client:
        return [tokens(client, *pictures) for pictures in ASKED]


def tokens(client: Client, *pictures: bytes) -> list[int]:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    events = client.generate("<image>" * len(pictures) + "What is it?", pictures, params, timeout_s=ANSWER_S)
    return [token for event in events for token in event.delta.token_ids]


def all_at_once(server: UpServer) -> list[list[int]]:
    """Its answers to each of the pictures."""
    with ThreadPoolExecutor(len(PICTURES)) as pool:
        return [*pool.map(lambda data: tokens(server.client, data), PICTURES)]


def nodes_of(server: UpServer, role: str) -> dict[str, str]:
    """Names and nodes of the live processes with this role."""
    rows = server.client.list_workers().workers
    return {row.name: row.node for row in rows if row.role == role and row.state != "lost"}


def pending(server: UpServer) -> str:
    """Why it has fewer vision workers than it wants."""
    return server.client.list_workers().vision_pending


def segments(state: ServerState) -> list[str]:
    """Names of what its vision workers have in this machine's shared memory."""
    return [path.name for path in Path("/dev/shm").glob(f"{state.run.segment_prefix}*")]


def overrides(address: str, placement: str, **vision: str) -> list[str]:
    keys = {"cluster.ray_address": address, "cluster.placement": placement, "model.dtype": "float32"}
    keys |= {f"vision.{name}": value for name, value in vision.items()}
    return [f"{key}={value}" for key, value in keys.items()]


def test_they_work_are_lost_and_come_again(home: Home, model: Path, expected: list[list[int]]) -> None:
    with ExitStack() as stack:
        address = stack.enter_context(head_node(num_cpus=1, host=HEAD))
        other = stack.enter_context(further_node(address, OTHER, "other", {"pictures": 2}))
        needs = "{num_cpus: 0, resources: {pictures: 1}}"
        settings = overrides(address, "PACK", actor_options=needs, autoscaling_config="{min_replicas: 2}")
        server = UpServer(home, model, settings)
        stack.callback(server.close)
        stack.callback(lambda: print(server.text()))  # shown when it fails
        state = server.wait_ready()
        wait_until(lambda: len(server.vision_workers()) == 2, ANSWER_S, "both vision workers")

        assert {*nodes_of(server, "vision_worker").values()} == {"other"}
        assert "other" not in {*nodes_of(server, "worker").values(), *nodes_of(server, "controller").values()}
        assert [tokens(server.client, *pictures) for pictures in ASKED[:4]] == expected[:4]
        assert tokens(server.client, *ASKED[-1]) == expected[-1]
        assert segments(state) == []

        for replicas in (1, 2):  # the one that goes is asked to over the bus, and has ended in order
            server.client.scale_vision(replicas)
            wait_until(lambda n=replicas: len(nodes_of(server, "vision_worker")) == n, ANSWER_S, f"{replicas} of them")
        assert "ended:" not in server.text()

        workers = [process for process in other.processes() if process.pid in server.pids("vision_worker")]
        assert len(workers) == 2
        other.kill()
        assert alive(workers) == []
        waiting = stack.enter_context(ThreadPoolExecutor()).submit(tokens, server.client, *ASKED[5])
        assert len(server.tokens()) == 6
        wait_until(lambda: not server.vision_workers(), ANSWER_S, "their loss is noticed")
        assert len(server.tokens()) == 6
        wait_until(lambda: "needs 1 pictures, 0 free" in pending(server), ANSWER_S, "it is said why there are none")
        assert not waiting.done()

        stack.enter_context(further_node(address, THIRD, "third", {"pictures": 1}))
        assert waiting.result() == expected[5]
        assert tokens(server.client, *ASKED[4]) == expected[4]
        assert {*nodes_of(server, "vision_worker").values()} == {"third"}
        assert home.airside("down").returncode == 0
        assert server.process.wait(PATIENCE_S) == 0, server.text()
        assert server.left(state) == []
        assert "ended: killed" not in server.text().partition("stopping")[2]


def test_some_here_and_some_there_through_the_loss_of_controller_and_supervisor(
    home: Home, model: Path, expected: list[list[int]]
) -> None:
    with ExitStack() as stack:
        room = {"pictures": 2}  # on each of the two nodes
        address = stack.enter_context(head_node(num_cpus=1, host=HEAD, resources=room))
        stack.enter_context(further_node(address, OTHER, "other", room))
        needs = "{num_cpus: 0, resources: {pictures: 1}}"
        settings = overrides(address, "SPREAD", actor_options=needs, autoscaling_config="{min_replicas: 4}")
        server = UpServer(home, model, settings)
        stack.callback(server.close)
        stack.callback(lambda: print(server.text()))  # shown when it fails
        state = server.wait_ready()
        here = nodes_of(server, "controller")["controller"]

        def are_spread() -> bool:
            nodes = [*nodes_of(server, "vision_worker").values()]
            return len(server.vision_workers()) == 4 and sorted(nodes) == sorted([here, "other"] * 2)

        def own_segments() -> set[str]:
            nodes = nodes_of(server, "vision_worker")
            return {f"{state.run.segment_prefix}{name}" for name, node in nodes.items() if node == here}

        wait_until(are_spread, ANSWER_S, "vision workers on both nodes")
        assert {*segments(state)} == own_segments()
        assert all_at_once(server) == expected[: len(PICTURES)]

        [controller] = server.pids("controller")
        os.kill(controller, signal.SIGKILL)
        wait_until(lambda: is_new(server, controller) and are_spread(), ANSWER_S, "all have come again")
        assert {*segments(state)} == own_segments()
        assert all_at_once(server) == expected[: len(PICTURES)]

        pids = server.pids("vision_worker", "controller", "worker", "gateway")
        processes = [process for process in psutil.process_iter() if process.pid in pids]
        assert len(processes) == 7
        server.process.kill()
        server.process.wait()
        assert home.airside("down", "--port", str(server.port)).returncode == 0
        wait_until(lambda: alive(processes) == [], PATIENCE_S, "those on the other node are gone too")
        assert server.left(state) == []


def test_pictures_of_a_node_that_falls_silent_are_made_elsewhere(
    home: Home, model: Path, expected: list[list[int]]
) -> None:
    with ExitStack() as stack:
        room = {"pictures": 1}  # on each of the two nodes
        address = stack.enter_context(head_node(num_cpus=1, host=HEAD, resources=room))
        other = stack.enter_context(further_node(address, OTHER, "other", room))
        needs = "{num_cpus: 0, resources: {pictures: 1}}"
        settings = overrides(address, "SPREAD", actor_options=needs, autoscaling_config="{min_replicas: 2}")
        server = UpServer(home, model, [*settings, "cluster.silence_timeout_s=10"])
        stack.callback(server.close)
        stack.callback(lambda: print(server.text()))  # shown when it fails
        state = server.wait_ready()
        wait_until(lambda: len(server.vision_workers()) == 2, ANSWER_S, "one on each node")
        assert "other" in nodes_of(server, "vision_worker").values()

        other.suspend()
        assert all_at_once(server) == expected[: len(PICTURES)]
        wait_until(lambda: "hangs: silent for 10 s; it is ended" in server.text(), ANSWER_S, "the supervisor says so")
        assert "other" not in nodes_of(server, "vision_worker").values()
        assert home.airside("down").returncode == 0
        assert server.process.wait(PATIENCE_S) == 0, server.text()
        assert server.left(state) == []


def is_new(server: UpServer, controller: int) -> bool:
    """Whether another controller than this one answers."""
    try:
        return server.is_ready() and server.pids("controller") - {controller} != set()
    except grpc.RpcError:
        return False
