"""What is said while a server starts, with a stand-in for the server."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from airside.cluster.runs import startup_progress
from airside.cluster.runs.startup_progress import StartupProgress
from airside.proto import airside_pb2 as pb
from tests.cluster.test_launch import plan

VISION_UP = [pb.Worker(role="vision_worker", state="busy")]


class Starting:
    """The client and the vision pool in one: what they say is set by the test."""

    def __init__(self) -> None:
        self.state: str | None = None  # None: nobody listens yet
        self.workers: list[pb.Worker] = []
        self.pending = ""

    def info(self, _timeout_s: float) -> pb.ServerInfo:
        if self.state is None:
            raise grpc.RpcError
        return pb.ServerInfo(state=self.state)

    def list_workers(self, _timeout_s: float) -> pb.ListWorkersReply:
        return pb.ListWorkersReply(workers=self.workers)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Starting:
    monkeypatch.setattr(startup_progress, "_ASK_EVERY_S", 0.0)
    return Starting()


def progress_of(server: Any, said: list[str]) -> StartupProgress:  # Any: a stand-in
    return StartupProgress(plan(image_token_id=9), server, server, said.append)


def test_each_thing_that_is_waited_for_is_said_once(server: Starting) -> None:
    said: list[str] = []
    progress = progress_of(server, said)
    for state in (None, None, "starting", "starting", "ready", "ready"):
        server.state = state
        assert not progress.is_ready()
    server.workers = VISION_UP
    assert progress.is_ready()
    assert [line.partition(" …")[0] for line in said] == [
        "starting the controller, the gateway and the model workers",
        "loading weights on 1 rank",
        "starting vision workers",
    ]


def test_a_long_wait_is_said_again(server: Starting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_progress, "TELL_EVERY_S", 0.0)
    said: list[str] = []
    progress = progress_of(server, said)
    assert [progress.is_ready() for _ in range(3)] == [False] * 3
    assert len(said) == 3


def test_a_pool_that_cannot_start_does_not_hold_up_text(server: Starting) -> None:
    said: list[str] = []
    server.state, server.pending = "ready", "1 pending: needs 1 CPU, 0 are free"
    assert progress_of(server, said).is_ready()
    assert said == ["serving without vision workers: 1 pending: needs 1 CPU, 0 are free"]
