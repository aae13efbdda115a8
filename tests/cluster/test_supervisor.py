"""The supervisor over a stand-in for Ray: its actors are processes that sleep, and the test is the controller."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from airside.cluster.launch_plan import Network, Run
from airside.cluster.runs.stop_signal import StopSignal
from airside.cluster.supervisor import ray_process
from airside.cluster.supervisor.ray_cluster import RayCluster
from airside.cluster.supervisor.ray_process import RayProcess
from airside.cluster.supervisor.supervisor import Supervisor
from airside.proto import messages as msg
from airside.proto.bus_keys import make_keys
from airside.proto.channel import Hub
from airside.proto.settings import VisionWorkerSettings
from tests.cluster.test_launch import plan
from tests.real_processes import wait_until

PATIENCE_S = 20.0
HOME = "home-node"


class Ref:
    """What a call of an actor's method returns: there once `is_ready`, and then `value`."""

    def __init__(self, is_ready: Callable[[], bool], value: Callable[[], object]) -> None:
        self.is_ready = is_ready
        self.value = value


class SleepingActor:
    """Its method `run` returns when the process has ended. One with settings for elsewhere is elsewhere."""

    def __init__(self, _settings: str, _num_threads: int, home: str = "", settings_elsewhere: str = "") -> None:
        self.process = subprocess.Popen(["sleep", "300"])
        assert home in ("", HOME)
        self.settings_elsewhere = settings_elsewhere
        place = self.process.pid, "another-node" if settings_elsewhere else HOME
        self.place = self._method(lambda: True, lambda: place)
        self.is_killed = False
        self.run = self._method(lambda: self.is_killed or not self.is_there, lambda: (self.process.wait(), ""))

    @property
    def is_there(self) -> bool:
        """Whether its process runs."""
        return self.process.poll() is None

    @staticmethod
    def _method(is_ready: Callable[[], bool], value: Callable[[], object]) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda: Ref(is_ready, value))


class StandInRay:
    """As much of Ray as `RayProcess` uses."""

    def __init__(self) -> None:
        self.exceptions = ray_process.ray.exceptions
        self.actors: list[SleepingActor] = []
        self.killed: list[int] = []
        self.strategies: list[object] = []

    def get_runtime_context(self) -> SimpleNamespace:
        return SimpleNamespace(get_node_id=lambda: HOME)

    def remote(self, _: type) -> SimpleNamespace:
        def options(scheduling_strategy: object, resources: dict[str, float], **_: object) -> SimpleNamespace:
            self.strategies.append((scheduling_strategy, *resources))
            return SimpleNamespace(remote=self._start)

        return SimpleNamespace(options=options)

    def _start(self, *arguments: Any) -> SleepingActor:
        self.actors.append(SleepingActor(*arguments))
        return self.actors[-1]

    def wait(self, refs: list[Ref], **_: object) -> tuple[list[Ref], list[Ref]]:
        return [ref for ref in refs if ref.is_ready()], [ref for ref in refs if not ref.is_ready()]

    def get(self, ref: Ref) -> object:
        return ref.value()

    def kill(self, actor: SleepingActor, no_restart: bool) -> None:
        assert no_restart
        self.killed.append(actor.process.pid)
        actor.is_killed = True
        self.end(actor)

    @staticmethod
    def end(actor: SleepingActor) -> None:
        """What becomes of one that is killed."""
        actor.process.kill()

    def end_all(self) -> None:
        for actor in self.actors:
            actor.process.kill()
            actor.process.wait()


class StandInCluster:
    """A node with room for everything."""

    node, node_resource, is_alive = "here", "node:here", True

    def bundle(self, index: int) -> int:
        return index

    def missing(self, *_: object) -> str:
        return ""

    def strategy(self, placement: str) -> str:
        return placement


class Stage:
    """A started supervisor, and the bus as the controller has it.

    Args:
        folder: of the run.
        network: the bus between nodes; None: all are on one.
    """

    def __init__(self, folder: Path, network: Network | None = None) -> None:
        config: dict[str, Any] = {"engine": {"tensor_parallel_size": 2}}
        if network is not None:
            config["cluster"] = {"ray_address": "auto", "placement": "SPREAD"}
        made = plan(config, run=Run("0a1b2c3d", folder), image_token_id=5)
        if network is not None:
            made = made.over(network)
        self.hub = Hub(made.run.endpoint)
        self.told: list[str] = []
        cluster = cast(RayCluster, StandInCluster())
        self.supervisor = Supervisor(made, cluster, StopSignal(), self.told.append)
        self.heard: list[msg.Message] = []
        self.supervisor.start(is_ready=lambda: len(self.processes()) == 5, timeout_s=PATIENCE_S)
        self.turn_until(lambda: any(isinstance(message, msg.SupervisorHello) for message in self.heard))

    def processes(self) -> dict[str, RayProcess]:
        return {process.name: process for process in self.supervisor._all()}

    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self.processes().items() if process.pid is not None}

    def send(self, message: msg.Message) -> None:
        assert self.hub.send("supervisor", message)

    def turn(self) -> bool:
        self.supervisor.turn()
        self.heard += [envelope.message for envelope in self.hub.receive(0)]
        return True

    def turn_until(self, holds: Callable[[], bool]) -> None:
        wait_until(lambda: self.turn() and holds(), PATIENCE_S, "the supervisor has done it")

    def close(self) -> None:
        """Of the supervisor, once."""
        if not self.supervisor._link._socket.closed:
            self.supervisor.close(0.0)

    def lost(self) -> dict[str, str]:
        return {message.name: message.detail for message in self.heard if isinstance(message, msg.PeerLost)}


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInRay]:
    stand_in = StandInRay()
    monkeypatch.setattr(ray_process, "ray", stand_in)
    yield stand_in
    stand_in.end_all()


@contextmanager
def stage_over(ray: StandInRay, network: Network | None) -> Iterator[Stage]:
    with tempfile.TemporaryDirectory(prefix="as", dir="/tmp") as folder:
        made = Stage(Path(folder), network)
        yield made
        ray.end_all()
        made.close()
        made.hub.close()


@pytest.fixture
def stage(ray: StandInRay) -> Iterator[Stage]:
    with stage_over(ray, None) as made:
        yield made


@pytest.fixture
def spread(ray: StandInRay) -> Iterator[Stage]:
    """Its vision workers are on another node."""
    with stage_over(ray, Network("tcp://127.0.0.2:7", *make_keys())) as made:
        yield made


@pytest.fixture
def signalled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Processes that this node's supervisor sends signals to; they get none."""
    pids: list[int] = []
    monkeypatch.setattr(ray_process, "os", SimpleNamespace(kill=lambda pid, _: pids.append(pid)))
    return pids


def stop(pid: int) -> None:
    """The process is there, and does nothing any more."""
    os.kill(pid, signal.SIGSTOP)


def test_a_stopped_rank_is_killed_and_the_group_starts_again(stage: Stage) -> None:
    before = stage.pids()
    stop(before["worker-1"])
    stage.turn()
    assert stage.pids() == before  # nobody sees it from outside
    stage.send(msg.PeerStuck("worker-1", before["worker-1"], "silent for 12 s"))
    stage.turn_until(lambda: len({*stage.pids().values()} - {*before.values()}) == 2)
    after = stage.pids()
    assert {name for name in after if after[name] != before[name]} == {"worker-0", "worker-1"}
    assert stage.lost()["worker-1"] == "killed, silent for 12 s"
    assert f"worker-1 (process {before['worker-1']}) hangs: silent for 12 s; it is ended" in stage.told

    # What is said of all ranks of a launch comes for the second one when its name is a new process's already.
    stage.send(msg.PeerStuck("worker-0", before["worker-0"], "silent for 12 s"))
    stage.send(msg.VisionTarget(2))
    stage.turn_until(lambda: "vision-1" in stage.pids())
    assert stage.pids() | after == stage.pids()


def test_a_stopped_vision_worker_is_killed_and_another_takes_its_place(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("airside.cluster.supervisor.vision_scaling.PROVEN_S", 0.0)
    before = stage.pids()
    stop(before["vision-0"])
    stage.send(msg.PeerStuck("vision-0", before["vision-0"], "no progress in 60 s"))
    stage.turn_until(lambda: "vision-1" in stage.pids())
    assert stage.lost() == {"vision-0": "killed, no progress in 60 s"}
    assert stage.pids().keys() == {*before, "vision-1"} - {"vision-0"}


def test_vision_workers_that_were_up_are_replaced_as_often_as_they_are_killed(stage: Stage) -> None:
    for number in range(4):  # as failed starts, the last would wait for 16 s
        name = f"vision-{number}"
        stage.turn_until(lambda name=name: name in stage.pids())
        stage.send(msg.VisionJoined(name))
        stage.turn()
        os.kill(stage.pids()[name], signal.SIGKILL)
    stage.turn_until(lambda: "vision-4" in stage.pids())
    assert not any(message.pending for message in stage.heard if isinstance(message, msg.VisionPool))
    stage.send(msg.VisionJoined("vision-0"))  # late, or of another supervisor's time
    stage.turn()


def test_a_stopped_gateway_is_killed_and_starts_again(stage: Stage) -> None:
    before = stage.pids()
    stop(before["gateway-0"])
    stage.send(msg.PeerStuck("gateway-0", before["gateway-0"], "silent for 12 s"))
    stage.turn_until(lambda: stage.pids().get("gateway-0", before["gateway-0"]) != before["gateway-0"])
    assert stage.lost() == {"gateway-0": "killed, silent for 12 s"}


@pytest.mark.parametrize(("name", "pid"), [("nobody", 0), ("worker-0", -1), ("worker-0", None)])
def test_nobody_else_is_killed(stage: Stage, name: str, pid: int | None) -> None:
    before = stage.pids()
    stage.send(msg.PeerStuck(name, before["worker-1"] if pid is None else pid, "silent for 12 s"))
    stage.send(msg.VisionTarget(2))
    stage.turn_until(lambda: "vision-1" in stage.pids())
    assert {**stage.pids(), **before} == stage.pids()
    assert stage.told == ["vision_scale from=1 to=2 why=asked"]


def test_vision_workers_alone_may_be_elsewhere_and_are_told_how_to_get_back(spread: Stage, ray: StandInRay) -> None:
    assert spread.pids().keys() == {"controller", "gateway-0", "worker-0", "worker-1", "vision-0"}
    assert [actor.settings_elsewhere != "" for actor in ray.actors] == [False, False, False, False, True]
    assert ray.strategies[-1] == ("SPREAD",)
    told = VisionWorkerSettings.from_json(ray.actors[-1].settings_elsewhere)
    assert (told.name, told.endpoint, told.shares_memory) == ("vision-0", "tcp://127.0.0.2:7", False)


def test_on_one_node_vision_workers_are_kept_there(stage: Stage, ray: StandInRay) -> None:
    assert len(stage.pids()) == len(ray.actors)
    assert not any(actor.settings_elsewhere for actor in ray.actors)
    assert ray.strategies[-1] == ("STRICT_PACK", "node:here")


def test_one_that_hangs_elsewhere_is_killed_by_ray_and_no_process_here_is(
    spread: Stage, ray: StandInRay, signalled: list[int]
) -> None:
    before = spread.pids()
    spread.send(msg.PeerStuck("vision-0", before["vision-0"], "silent for 12 s"))
    spread.turn_until(lambda: "vision-0" in spread.lost())
    assert spread.lost() == {"vision-0": "killed, silent for 12 s"}
    assert before["vision-0"] in ray.killed
    assert signalled == []


def test_at_the_end_those_elsewhere_are_left_to_the_controller_and_then_to_ray(
    spread: Stage, ray: StandInRay, signalled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("airside.cluster.supervisor.supervisor._STOP_S", 0.3)
    before = spread.pids()
    spread.close()

    def is_told() -> bool:
        spread.heard += [envelope.message for envelope in spread.hub.receive(50)]
        return msg.Shutdown("the server is stopping") in spread.heard

    wait_until(is_told, PATIENCE_S, "the controller is told to end")
    assert {*before.values()} <= {*ray.killed}
    assert {*signalled} == {pid for name, pid in before.items() if name != "vision-0"}


def test_segments_of_the_killed_are_removed_though_ray_says_too_early_that_they_have_ended(
    stage: Stage, ray: StandInRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = stage.pids()["vision-0"]
    [worker] = [actor for actor in ray.actors if actor.process.pid == pid]
    there: list[bool] = []
    monkeypatch.setattr("airside.cluster.supervisor.supervisor.sweep", lambda _: there.append(worker.is_there))
    monkeypatch.setattr(ray_process, "os", SimpleNamespace(kill=lambda *_: None))
    monkeypatch.setattr(ray, "end", lambda actor: threading.Timer(0.3, actor.process.kill).start())
    stage.supervisor._replace_controller()
    assert there == [False]


def test_vision_workers_follow_the_load_and_what_is_asked_for(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr("airside.cluster.supervisor.supervisor.time", SimpleNamespace(monotonic=lambda: now.s))
    others = {name: pid for name, pid in stage.pids().items() if not name.startswith("vision")}

    def hear(load: msg.VisionLoad, for_s: float) -> None:
        for _ in range(int(for_s) + 1):
            now.s += 1.0
            stage.send(load)
            stage.turn()

    hear(msg.VisionLoad(queued=9, in_hand=1, workers=1, wait_s=0.15), for_s=3)
    stage.turn_until(lambda: {"vision-0", "vision-1", "vision-2"} <= stage.pids().keys())
    assert msg.VisionPool(3, "", 1, 4, {"up_load": 1}) in stage.heard
    hear(msg.VisionLoad(queued=0, in_hand=0, workers=3, wait_s=0.0), for_s=60)
    stage.turn_until(lambda: msg.DrainVision("vision-1") in stage.heard)
    assert msg.DrainVision("vision-2") in stage.heard
    assert msg.DrainVision("vision-0") not in stage.heard
    assert msg.VisionPool(1, "", 1, 4, {"up_load": 1, "down_load": 1}) in stage.heard
    stage.send(msg.VisionTarget(2, 3))
    stage.turn_until(lambda: msg.VisionPool(2, "", 2, 3, {"up_load": 1, "down_load": 1, "up_asked": 1}) in stage.heard)
    assert stage.told == [
        "vision_scale from=1 to=3 why=load",
        "vision_scale from=3 to=1 why=load",
        "vision_scale from=1 to=2 why=asked",
    ]
    assert stage.pids() | others == stage.pids()
