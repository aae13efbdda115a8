"""The offline `LLM`'s side of the bus, with a test in the controller's place."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TypeVar

import pytest

from airside.cluster.local_processes import LocalProcesses
from airside.cluster.offline import session as offline_session
from airside.cluster.offline.session import NAME, OfflineError, Session
from airside.proto import messages as msg
from airside.proto.channel import Hub

M = TypeVar("M", bound=msg.Message)

READY = msg.EngineState("ready", "", 128, 1024, False)
STARTING = msg.EngineState("starting", "loading", 128, 0, False)


class Desk:
    """Children that are none, a hub in the controller's place, and the session under test."""

    def __init__(self, processes: LocalProcesses) -> None:
        self.hub = Hub(processes.endpoint)
        self.session = Session(processes.endpoint, processes)
        self.session.send(msg.Heartbeat(0))  # from here on the hub knows its name
        self.expect(msg.Heartbeat)

    def expect(self, kind: type[M]) -> M:
        (envelope,) = [e for e in self.hub.receive(5000) if isinstance(e.message, kind)]
        assert isinstance(envelope.message, kind)
        return envelope.message

    def say(self, *messages: msg.Message) -> None:
        for message in messages:
            assert self.hub.send(NAME, message)

    def heard(self, count: int) -> list[type[msg.Message]]:
        """What was said: waits for `count` messages, which come one by one, and for one too many."""
        kinds: list[type[msg.Message]] = []
        until = time.monotonic() + 5
        while len(kinds) < count and time.monotonic() < until:
            kinds += [type(envelope.message) for envelope in self.hub.receive(50)]
        return kinds + [type(envelope.message) for envelope in self.hub.receive(100)]


@pytest.fixture
def desk() -> Iterator[Desk]:
    with LocalProcesses() as processes:
        made = Desk(processes)
        yield made
        made.session.close()
        made.hub.close()


def test_it_is_heard_however_fast_tokens_come(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline_session, "HEARTBEAT_S", 0.0)
    batch = msg.OutputBatch(b"", b"", b"")
    desk.say(*[batch] * 5)
    assert [desk.session.receive() for _ in range(5)] == [batch] * 5
    assert desk.heard(5) == [msg.Heartbeat] * 5


def test_being_let_go_is_an_error_and_a_hello_makes_up(desk: Desk) -> None:
    gone = msg.Shutdown("say hello again")
    desk.say(gone, gone)
    with pytest.raises(OfflineError, match="let go of this process: say hello again"):
        desk.session.receive()
    desk.say(READY)  # the answer to the hello, behind what was left of the time before
    assert desk.session.hello() == READY
    desk.say(msg.Accepted(1, 0))
    assert desk.session.receive() == msg.Accepted(1, 0)


def test_it_waits_until_the_engine_is_ready(desk: Desk) -> None:
    desk.say(STARTING, STARTING, READY)
    assert desk.session.await_ready(10) == READY
    desk.say(STARTING)
    with pytest.raises(OfflineError, match="not ready after 0 s"):
        desk.session.await_ready(0)


def test_an_answer_is_that_of_its_question(desk: Desk) -> None:
    desk.say(READY, msg.Gauges(999, {"steps": 1}, {}, {}), msg.Gauges(1, {"steps": 2}, {}, {}))
    assert desk.session.ask(msg.GaugesQuery, msg.Gauges).gauges == {"steps": 2}
