"""The sockets: nobody is blocked by anybody, and refused frames are counted."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from airside.proto import channel, messages
from airside.proto.channel import AsyncLink, Hub, Link
from airside.proto.messages import Credit, Heartbeat, Job, StepResult


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/bus"


@pytest.fixture
def hub(endpoint: str) -> Iterator[Hub]:
    with Hub(endpoint) as opened:
        yield opened


def receive_one(hub: Hub) -> channel.Envelope:
    return next(hub.receive(5000))


def test_messages_and_attachments_go_both_ways(hub: Hub, endpoint: str) -> None:
    link = Link(endpoint, "vision-0")
    link.send(Credit(1), [b"picture"])
    envelope = receive_one(hub)
    assert (envelope.peer, envelope.message, bytes(envelope.attachments[0])) == ("vision-0", Credit(1), b"picture")

    assert hub.send("vision-0", Job(1, 0, 1), [memoryview(b"x" * 100_000)])
    answer = link.receive(5000)
    assert answer is not None
    assert answer.message == Job(1, 0, 1)
    assert len(answer.attachments[0]) == 100_000
    link.close()


def test_unknown_peer_is_a_false_not_an_error(hub: Hub) -> None:
    assert hub.send("nobody", Heartbeat(0)) is False


def test_a_peer_that_does_not_read_cannot_block_the_hub(hub: Hub, endpoint: str) -> None:
    context = zmq.Context()
    stuck = context.socket(zmq.DEALER)
    stuck.setsockopt(zmq.IDENTITY, b"stuck")
    stuck.setsockopt(zmq.RCVHWM, 1)  # a `Link` takes all that comes, also while nobody asks it for messages
    stuck.connect(endpoint)
    stuck.send(messages.encode(Heartbeat(0)))
    receive_one(hub)
    payload = StepResult(1, b"x" * 65_536, 0.0)
    sent = 0
    while hub.send("stuck", payload):
        sent += 1
        assert sent < 2 * channel.OUTBOX_MESSAGES_MAX
    assert hub.send("stuck", payload) is False
    stuck.close(0)
    context.term()


def test_refused_frames_are_counted_and_passed_over(hub: Hub, endpoint: str) -> None:
    context = zmq.Context()
    raw = context.socket(zmq.DEALER)
    raw.setsockopt(zmq.IDENTITY, b"raw")
    raw.connect(endpoint)
    for frame in (b"", b"\x09rubbish", b"\x01\x92\xcd\x7f\xff\x01"):
        raw.send(frame)
    raw.send(b"\x01\x92\x01\x05")  # Heartbeat(5)
    received = []
    while not received:
        received = [envelope.message for envelope in hub.receive(5000)]
    assert received == [Heartbeat(5)]
    assert hub.refused == {"malformed": 1, "version": 1, "unknown_kind": 1}
    raw.close()
    context.term()


def test_a_watched_descriptor_ends_the_wait(hub: Hub, endpoint: str) -> None:
    """Otherwise the test would run into its time limit."""
    descriptor = os.eventfd(0, os.EFD_NONBLOCK)
    link = Link(endpoint, "worker-0")
    link.watch(descriptor)
    os.eventfd_write(descriptor, 1)
    assert link.receive(timeout_ms=3_600_000) is None
    os.eventfd_read(descriptor)
    link.send(Heartbeat(1))
    receive_one(hub)
    assert hub.send("worker-0", Heartbeat(2))
    envelope = link.receive(timeout_ms=3_600_000)
    assert envelope is not None
    assert envelope.message == Heartbeat(2)
    link.close()
    os.close(descriptor)


def test_async_link_sends_while_it_waits(hub: Hub, endpoint: str) -> None:
    async def talk() -> list[object]:
        link = AsyncLink(endpoint, "gateway-0")
        waiting = asyncio.create_task(link.receive())
        got: list[object] = []
        for turn in range(50):
            link.send(Heartbeat(turn))
            envelope = await asyncio.to_thread(receive_one, hub)
            assert hub.send(envelope.peer, Credit(turn))
            got.append(await asyncio.wait_for(waiting, 5))
            waiting = asyncio.create_task(link.receive())
        waiting.cancel()
        link.close()
        return got

    assert asyncio.run(talk()) == [Credit(turn) for turn in range(50)]


def test_one_that_is_forgotten_is_closed(endpoint: str) -> None:
    """In a circle of references everything goes at once, in any order; a socket left open would stop the world."""
    with Hub(endpoint):
        link = Link(endpoint, "forgetful")
        link.circle = [link]  # type: ignore[attr-defined]
        context = link._context
        link.send(Heartbeat(1))
        del link
        gc.collect()
        assert context.closed
