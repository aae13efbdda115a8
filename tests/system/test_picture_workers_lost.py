"""Vision workers that are killed, hang, run out of memory or die of a picture: nobody waits for them for ever.

What Ray has to do with it, new vision workers in the place of lost ones, is shown in `test_cluster.py`; here the tests
start them, or do not.
"""

from __future__ import annotations

import io
import os
import resource
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from PIL import Image

from airside.proto import messages as msg
from airside.proto.channel import Link
from tests.checkpoints import make_idefics3
from tests.real_processes import wait_until
from tests.system.local_server import LocalServer, read_failing
from tests.system.picture_requests import (
    PATIENCE_S,
    answer,
    in_new_file,
    is_idle,
    picture,
    request,
    vision_states,
)

pytestmark = pytest.mark.slow

CANARY = request("The small red circle", max_tokens=500)
SMALL = picture(60, 40, 1)
MIDDLING = picture(4096, 4096)


def as_large_as_may_be() -> bytes:
    """64 million pixels in a small file: a vision worker has it in hand for long, and needs 192 MB for it."""
    file = io.BytesIO()
    Image.new("L", (8000, 8000), 200).save(file, "PNG")
    return file.getvalue()


LARGE = as_large_as_may_be()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_idefics3(tmp_path_factory.mktemp("idefics3"))


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[LocalServer]:
    """With one vision worker, before and after each test."""
    with LocalServer(checkpoint, vision={"arena": "64MiB"}) as running:
        yield running


@contextmanager
def killing(server: LocalServer) -> Iterator[Callable[[str], None]]:
    """Kills vision workers by name and tells the controller at once, as the supervisor does."""
    link = Link(server.processes.endpoint, "supervisor")
    link.send(msg.SupervisorHello("local", os.getpid()))

    def kill(name: str) -> None:
        os.kill(server.processes.pid(name), signal.SIGKILL)
        link.send(msg.PeerLost(name, "it was killed"))
        wait_until(lambda: vision_states(server)[name] == "lost", PATIENCE_S, f"{name} is lost")

    try:
        yield kill
    finally:
        link.close()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that hangs, until it is killed."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)


def tokens_of(server: LocalServer, file: bytes, number: int) -> list[int]:
    return answer(server, request("<image>What is it?", in_new_file(file, number))).token_ids


def at_work(server: LocalServer) -> str:
    """The one vision worker that is there, as soon as it has a picture in hand."""

    def busy() -> list[str]:
        return [name for name, state in vision_states(server).items() if state == "busy"]

    wait_until(lambda: len(busy()) == 1, PATIENCE_S, "a vision worker is busy")
    return busy()[0]


def test_pictures_outlive_all_vision_workers(checkpoint: Path) -> None:
    """One is killed and the other hangs, both with pictures in hand. Texts go on, and the pictures wait for a third."""
    vision = {"autoscaling_config": {"min_replicas": 2}, "arena": "64MiB"}
    with (
        LocalServer(checkpoint, vision=vision, cluster={"silence_timeout_s": 3}) as server,
        killing(server) as kill,
        ThreadPoolExecutor() as pool,
    ):
        quiet, expected = answer(server, CANARY).token_ids, tokens_of(server, MIDDLING, 0)
        canary = pool.submit(answer, server, CANARY)
        waiting = [pool.submit(tokens_of, server, MIDDLING, number) for number in range(1, 5)]
        wait_until(lambda: list(vision_states(server).values()) == ["busy"] * 2, PATIENCE_S, "both at work")
        kill("vision-0")
        with stopped(server.processes.pid("vision-1")):
            wait_until(lambda: server.gauges().vision_workers == 0, PATIENCE_S, "both lost")
            assert not all(future.done() for future in waiting)
            assert len(answer(server, request("Nobody is there", max_tokens=8)).token_ids) == 8
            server.start_vision_worker(2)
            assert [future.result() for future in waiting] == [expected] * 4
        assert canary.result().token_ids == quiet
        wait_until(lambda: is_idle(server), PATIENCE_S, "nothing is left of any request")
        assert vision_states(server) == {"vision-0": "lost", "vision-1": "lost", "vision-2": "ready"}


@contextmanager
def little_memory(pid: int) -> Iterator[None]:
    """A process that can have no more than a few MB on top of what it has."""
    before = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (psutil.Process(pid).memory_info().vms + (16 << 20), before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_AS, before)


def test_a_picture_that_takes_too_much_memory_ends_its_own_request_only(server: LocalServer) -> None:
    expected = tokens_of(server, SMALL, 0)
    (name,) = [name for name, state in vision_states(server).items() if state != "lost"]
    with little_memory(server.processes.pid(name)), ThreadPoolExecutor(4) as pool:
        neighbours = [pool.submit(tokens_of, server, SMALL, number) for number in range(1, 4)]
        asked = request("<image>and<image>?", in_new_file(SMALL, 4), in_new_file(LARGE, 0))
        events, error = read_failing(server.inference.Generate(asked, timeout=PATIENCE_S))
        assert [future.result() for future in neighbours] == [expected] * 3
    end = events[-1].finished
    assert error.code() is grpc.StatusCode.INTERNAL
    assert (end.reason, end.detail) == ("vision_failed", error.details())
    assert end.detail.startswith("image 1: "), end.detail
    assert "the vision worker failed on this picture (MemoryError)" in end.detail
    assert len(tokens_of(server, LARGE, 0)) == 4  # the same file, now that there is memory
    assert name not in server.processes.exited()
    wait_until(lambda: is_idle(server), PATIENCE_S, "nothing is left of any request")


def test_a_picture_that_every_vision_worker_dies_of_is_given_up(server: LocalServer) -> None:
    """After three. The others are answered by the next, and so is it, if it kills no more."""
    expected = tokens_of(server, SMALL, 0)
    number = len(vision_states(server))
    asked = request("<image>and<image>?", in_new_file(SMALL, 0), in_new_file(LARGE, 1))  # the first is there already
    with killing(server) as kill, ThreadPoolExecutor(4) as pool:
        doomed = pool.submit(lambda: read_failing(server.inference.Generate(asked, timeout=PATIENCE_S)))
        neighbours = []
        for attempt in range(3):
            kill(at_work(server))
            neighbours.append(pool.submit(tokens_of, server, SMALL, 10 + attempt))
            server.start_vision_worker(number + attempt)
        events, error = doomed.result()
        assert [future.result() for future in neighbours] == [expected] * 3
    end = events[-1].finished
    assert error.code() is grpc.StatusCode.INTERNAL
    assert (end.reason, end.detail) == ("vision_failed", error.details())
    assert end.detail == "image 1: vision worker lost: three died on it; save the picture anew, or smaller"
    assert len(answer(server, asked).token_ids) == 4
    wait_until(lambda: is_idle(server), PATIENCE_S, "nothing is left of any request")
