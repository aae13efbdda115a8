"""Thirty-two large pictures at once, on one vision worker, and those who have nothing to do with them.

Nothing here looks at a clock: what came before what tells whether anybody waited for a picture.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from airside.proto import airside_pb2 as pb
from tests.checkpoints import make_idefics3
from tests.real_processes import wait_until
from tests.system.local_server import Answer, LocalServer
from tests.system.picture_requests import PATIENCE_S, answer, in_new_file, is_idle, picture, request

pytestmark = pytest.mark.slow

NUM_PICTURES = 32
NUM_TEXTS = 6
PICTURE = picture(4096, 4096)
CANARY = request("The small red circle", max_tokens=400)
READY, TOKEN, HEALTHY = "image_ready", "token", "healthy"
_BETWEEN_QUESTIONS_S = 0.005  # so that the questions themselves are no load


@dataclass
class Burst:
    """What came in which order, and what it cost."""

    events: list[str] = field(default_factory=list)
    """Of all requests and questions, in the order that their askers saw them, until the last picture was ready."""
    pictures: list[Answer] = field(default_factory=list)
    canaries: list[list[int]] = field(default_factory=list)
    quiet_canary: list[int] = field(default_factory=list)
    quiet_picture: list[int] = field(default_factory=list)
    ready_during_texts: int = 0  # pictures, while `NUM_TEXTS` texts were asked and answered after all of them
    extra_s: float = 0.0  # processor time that the controller took, beyond that of as many steps of one text alone

    def between_pictures(self, kind: str) -> list[int]:
        """How many events of this kind came between each picture and the next."""
        counts, after_first = [0], self.events[self.events.index(READY) + 1 :]
        for event in after_first:
            if event == READY:
                counts.append(0)
            counts[-1] += event == kind
        return counts[:-1]


class Scene:
    """The burst as it goes on. Each method runs in a thread of its own."""

    def __init__(self, server: LocalServer) -> None:
        self.server = server
        self.burst = Burst()
        self.accepted = threading.Barrier(NUM_PICTURES + 1)
        self.pause = threading.Event()  # nobody sets it

    @property
    def num_ready(self) -> int:
        return self.burst.events.count(READY)

    @property
    def is_over(self) -> bool:
        return self.num_ready == NUM_PICTURES

    def ask_about_picture(self, number: int) -> Answer:
        asked = request("<image>What is it?", in_new_file(PICTURE, number))
        events = []
        for event in self.server.inference.Generate(asked, timeout=PATIENCE_S):
            events.append(event)
            if event.HasField("accepted"):
                self.accepted.wait(PATIENCE_S)
            if event.HasField("image_ready"):
                self.burst.events.append(READY)
        return Answer(events)

    def sing(self) -> None:
        """One text after another, token by token."""
        while not self.is_over:
            tokens: list[int] = []
            for event in self.server.inference.Generate(CANARY, timeout=PATIENCE_S):
                tokens += event.delta.token_ids
                self.burst.events += [TOKEN] * len(event.delta.token_ids)
            self.burst.canaries.append(tokens)

    def ask_for_health(self) -> None:
        """Of the gateway, and of the controller behind it."""
        health = health_pb2_grpc.HealthStub(self.server.channel)
        while not self.is_over:
            status = health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S).status
            assert status == health_pb2.HealthCheckResponse.SERVING
            gauges = self.server.control.GetServerInfo(pb.GetServerInfoRequest(), timeout=PATIENCE_S).gauges
            assert gauges.vision_workers == 1
            self.burst.events.append(HEALTHY)
            self.pause.wait(_BETWEEN_QUESTIONS_S)

    def ask_texts(self) -> None:
        """After all pictures were accepted."""
        self.accepted.wait(PATIENCE_S)
        before = self.num_ready
        for number in range(NUM_TEXTS):
            assert len(answer(self.server, request(f"Quick {number}", max_tokens=4)).token_ids) == 4
        self.burst.ready_during_texts = self.num_ready - before


def controller_work(server: LocalServer) -> tuple[float, int]:
    """Processor seconds of the controller, and steps."""
    times = psutil.Process(server.processes.pid("controller")).cpu_times()
    return times.user + times.system, server.gauges().steps


@pytest.fixture(scope="module")
def burst(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Burst]:
    model: Path = make_idefics3(tmp_path_factory.mktemp("idefics3"))
    with LocalServer(model, vision={"arena": "64MiB"}) as server:
        scene = Scene(server)
        scene.burst.quiet_picture = answer(server, request("<image>What is it?", in_new_file(PICTURE, -1))).token_ids
        marks = [controller_work(server)]
        scene.burst.quiet_canary = answer(server, CANARY).token_ids
        marks.append(controller_work(server))
        with ThreadPoolExecutor(NUM_PICTURES + 3) as pool:
            others = [pool.submit(scene.sing), pool.submit(scene.ask_for_health), pool.submit(scene.ask_texts)]
            answers = list(pool.map(scene.ask_about_picture, range(NUM_PICTURES)))
            marks.append(controller_work(server))
            for future in others:
                future.result()
        scene.burst.pictures = answers
        (quiet_s, quiet_steps), (busy_s, busy_steps) = (
            (after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(marks)
        )
        scene.burst.extra_s = busy_s - busy_steps * quiet_s / quiet_steps
        wait_until(lambda: is_idle(server), PATIENCE_S, "everything given back")
        yield scene.burst


def test_texts_that_come_later_are_answered_sooner(burst: Burst) -> None:
    """Six, one after the other, take the time of a few pictures and not of thirty-two."""
    assert burst.ready_during_texts <= NUM_PICTURES // 4


@pytest.mark.parametrize("kind", [TOKEN, HEALTHY])
def test_nobody_waits_for_a_picture(burst: Burst, kind: str) -> None:
    """Between a picture and the next, tokens of a text go on coming, and the gateway and the controller answer."""
    between = burst.between_pictures(kind)
    assert len(between) == NUM_PICTURES - 1
    assert sum(count == 0 for count in between) <= NUM_PICTURES // 3, between  # on a busy machine all take turns
    assert sorted(between)[NUM_PICTURES // 2] >= 4, between


def test_the_controller_does_no_picture_work(burst: Burst) -> None:
    """It passes their files on, which is little beside what vision workers do with them."""
    stages = [done.finished.timings.images for done in burst.pictures]
    assert burst.extra_s < sum(one.decode_s + one.process_s for one in stages) / 2


def test_all_answers_are_right(burst: Burst) -> None:
    assert burst.canaries
    assert all(tokens == burst.quiet_canary for tokens in burst.canaries)
    assert [done.token_ids for done in burst.pictures] == [burst.quiet_picture] * NUM_PICTURES
