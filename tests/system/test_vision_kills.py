"""Vision workers are killed again and again, some of them stopped instead: every answer is the quiet one."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest

from airside.proto import airside_pb2 as pb
from airside.proto import messages as msg
from airside.proto.airside_pb2_grpc import ControlStub, InferenceStub
from airside.proto.channel import Link
from tests.checkpoints import make_idefics3
from tests.cluster.up_server import PATIENCE_S, UpServer, new_home
from tests.real_processes import wait_until
from tests.system.local_server import Answer, LocalServer
from tests.system.picture_requests import in_new_file, picture, request

pytestmark = pytest.mark.slow

NUM_PICTURES = 20
UP_WORKERS = 3
NUM_CLIENTS = 6
KILL_EVERY_S = 1.0
PAUSE_S = 0.2  # before each request of a client: else all were over before the second kill
STOPPED_OF = 4  # one in so many is stopped (SIGSTOP) instead of killed
IMPATIENT = {
    "vision.autoscaling_config.min_replicas": UP_WORKERS,
    "cluster.silence_timeout_s": 6,  # of a busy machine's other processes too
    "vision.job_timeout_s": 3,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_idefics3(tmp_path_factory.mktemp("idefics3"))


class Crowd:
    """Clients that ask about pictures, each answer as it has to be.

    Args:
        channel: to the server, which is quiet now.
    """

    def __init__(self, channel: grpc.Channel) -> None:
        self._inference = InferenceStub(channel)
        self._files = [picture(96 + number % 7, 64 + number % 5, turn=37 * number) for number in range(NUM_PICTURES)]
        self._file_numbers = itertools.count()
        self._quiet = [self._ask(number) for number in range(NUM_PICTURES)]
        assert len({tuple(tokens) for tokens in self._quiet}) > NUM_PICTURES // 2, "hardly told apart"

    def _ask(self, number: int) -> list[int]:
        asked = request("<image>What is it?", in_new_file(self._files[number], next(self._file_numbers)), max_tokens=6)
        return Answer(list(self._inference.Generate(asked, timeout=2 * PATIENCE_S))).token_ids

    def ask(self, num_requests: int, turn: Callable[[], None], pause_s: float = 0.0) -> None:
        """Sends so many requests, a few at a time. `turn` is called again and again meanwhile, in this thread."""

        def ask_after_a_pause(number: int) -> list[int]:
            time.sleep(pause_s)
            return self._ask(number)

        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            numbers = [count % NUM_PICTURES for count in range(num_requests)]
            answers: list[Future[list[int]]] = [pool.submit(ask_after_a_pause, number) for number in numbers]
            while not all(answer.done() for answer in answers):
                turn()
        wrong = [
            (number, answer.exception() or answer.result())
            for number, answer in zip(numbers, answers, strict=True)
            if answer.exception() or answer.result() != self._quiet[number]
        ]
        assert not wrong


class Killer:
    """Kills the vision worker that has been up for longest, or stops it.

    Args:
        channel: to the server, which knows who is up.
    """

    def __init__(self, channel: grpc.Channel) -> None:
        self._control = ControlStub(channel)
        self._next = time.monotonic() + KILL_EVERY_S
        self.victims: list[int] = []

    def turn(self) -> None:
        """Does it when it is time to; not when nobody is up then."""
        if time.monotonic() < self._next:
            return
        self._next += KILL_EVERY_S
        reply = self._control.ListWorkers(pb.ListWorkersRequest(), timeout=PATIENCE_S)
        assert "failed to start" not in reply.vision_pending, "they were up, and are to be replaced soon"
        up = [row.pid for row in reply.workers if row.role == "vision_worker" and row.state in ("ready", "busy")]
        up = [pid for pid in up if pid not in self.victims]
        if not up:
            return
        self.victims.append(up[0])
        os.kill(up[0], signal.SIGSTOP if len(self.victims) % STOPPED_OF == 0 else signal.SIGKILL)


class Keeper:
    """Does for the vision workers of a `LocalServer` what a supervisor does: it replaces those that end.

    All calls must come from the thread that made the server.
    """

    def __init__(self, server: LocalServer) -> None:
        self._server = server
        self._link = Link(server.plan.run.endpoint, "supervisor")
        self._link.send(msg.SupervisorHello("local", os.getpid()))
        self._num_started = server.plan.vision_replicas
        self._seen_to: set[str] = set()
        self._next_beat = 0.0

    def turn(self) -> None:
        """One turn: what the controller says, who has ended."""
        if time.monotonic() >= self._next_beat:
            self._link.send(msg.Heartbeat(0))
            self._next_beat = time.monotonic() + 1.0
        envelope = self._link.receive(20)
        if envelope is not None and isinstance(envelope.message, msg.PeerStuck):
            with contextlib.suppress(ProcessLookupError):  # it was killed, and is known to be gone
                os.kill(envelope.message.pid, signal.SIGKILL)
        for name in self._server.processes.exited().keys() - self._seen_to:
            assert name.startswith("vision-"), self._server.processes.log(name)[-3000:]
            self._seen_to.add(name)
            self._link.send(msg.PeerLost(name, "killed"))
            self._server.start_vision_worker(self._num_started)
            self._num_started += 1

    def close(self) -> None:
        """It is lost, and the controller goes on without it."""
        self._link.close()


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_sixty_pictures_while_vision_workers_are_killed(model: Path) -> None:
    vision = {"autoscaling_config": {"min_replicas": 2}, "arena": "16MiB", "job_timeout_s": 3.0}
    with LocalServer(model, vision=vision, cluster={"silence_timeout_s": 6.0}) as server:
        crowd, killer, keeper = Crowd(server.channel), Killer(server.channel), Keeper(server)

        def kill_and_replace() -> None:
            killer.turn()
            keeper.turn()

        def is_whole() -> bool:
            keeper.turn()
            return all(map(has_ended, killer.victims)) and server.gauges().vision_workers == 2

        while len(killer.victims) <= STOPPED_OF:
            crowd.ask(60, kill_and_replace)
        wait_until(is_whole, PATIENCE_S, "all killed ones are replaced")
        crowd.ask(NUM_PICTURES, keeper.turn)
        wait_until(server.is_at_rest, PATIENCE_S, "everything given back")
        keeper.close()


@pytest.fixture(scope="module")
def up(model: Path) -> Iterator[UpServer]:
    with new_home() as home:
        server = UpServer(home, model, [f"{key}={value}" for key, value in IMPATIENT.items()])
        try:
            server.wait_ready()
            yield server
        finally:
            server.close()


def test_two_hundred_pictures_while_a_vision_worker_is_killed_every_second(up: UpServer) -> None:
    others = up.pids("controller", "gateway", "worker")
    with grpc.insecure_channel(up.address) as channel:
        crowd, killer = Crowd(channel), Killer(channel)

        def kill() -> None:
            killer.turn()
            time.sleep(0.02)

        while len(killer.victims) <= STOPPED_OF:
            crowd.ask(200, kill, PAUSE_S)
        wait_until(
            lambda: all(map(has_ended, killer.victims)) and len(up.vision_workers()) == UP_WORKERS,
            PATIENCE_S,
            "all killed ones are replaced",
        )
        crowd.ask(NUM_PICTURES, lambda: time.sleep(0.02))
    assert up.pids("controller", "gateway", "worker") == others
