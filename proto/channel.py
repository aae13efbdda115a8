"""The only file that knows sockets.

The controller binds one `Hub`; every other process connects one `Link` under its own name, which is its address.
Nothing here blocks on a peer: a peer whose outbox is full, or who is gone, makes `send` return False.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, cast

import zmq
import zmq.asyncio

from airside.proto.messages import Message, MessageRefused, decode, encode

OUTBOX_MESSAGES_MAX = 4096
"""Messages that may wait for one peer before it counts as stuck."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """A received message, who sent it, and the binary parts that came with it."""

    peer: str
    message: Message
    attachments: list[memoryview]


class Hub:
    """The controller's side of the bus: a bound ROUTER socket.

    Args:
        endpoint: a ZeroMQ endpoint, `ipc:///path` on one node or `tcp://host:port`.
    """

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.SNDHWM, OUTBOX_MESSAGES_MAX)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.bind(endpoint)
        self._close = weakref.finalize(self, _close, self._socket, self._context)
        self.received: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def receive(self, timeout_ms: int) -> Iterator[Envelope]:
        """Waits at most `timeout_ms` for a first message, then yields all that have come. Refused ones are counted."""
        if not self._socket.poll(timeout_ms):
            return
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            envelope = self._open(frames)
            if envelope is not None:
                yield envelope

    def _open(self, frames: Sequence[zmq.Frame]) -> Envelope | None:
        try:
            if len(frames) < 2:
                raise MessageRefused("malformed", f"{len(frames)} frames")
            message = decode(frames[1].buffer)
            peer = frames[0].bytes.decode()
        except (MessageRefused, UnicodeDecodeError) as error:
            self.refused[error.why if isinstance(error, MessageRefused) else "malformed"] += 1
            return None
        self.received[type(message).__name__] += 1
        return Envelope(peer, message, [frame.buffer for frame in frames[2:]])

    def send(self, peer: str, message: Message, attachments: Sequence[memoryview] = ()) -> bool:
        """Puts a message into the peer's outbox. False: the peer is unknown, gone, or its outbox is full."""
        return self.send_frame(peer, encode(message), attachments)

    def send_frame(self, peer: str, frame: bytes, attachments: Sequence[memoryview] = ()) -> bool:
        """The same for a message that is encoded already, as one that goes to several peers is."""
        try:
            self._socket.send_multipart([peer.encode(), frame, *attachments], zmq.NOBLOCK, copy=not attachments)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def close(self) -> None:
        """Sends what is left for at most a second, then frees the endpoint."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _close(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, context: zmq.Context[Any]) -> None:
    """For one end of the bus, closed or forgotten: a context that goes before its socket would wait for it for ever."""
    socket.close()
    context.term()


def _configure_link(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, name: str) -> None:
    socket.setsockopt(zmq.IDENTITY, name.encode())
    socket.setsockopt(zmq.SNDHWM, OUTBOX_MESSAGES_MAX)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)


class Link:
    """Any other process's side of the bus: a DEALER socket connected to the controller. One thread only."""

    def __init__(self, endpoint: str, name: str) -> None:
        self.name = name
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _configure_link(self._socket, name)
        self._socket.connect(endpoint)
        self._close = weakref.finalize(self, _close, self._socket, self._context)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self.refused: Counter[str] = Counter()

    def send(self, message: Message, attachments: Sequence[bytes | memoryview] = ()) -> None:
        """Queues a message. Raises zmq.Again when the controller has not taken 4,096 earlier ones."""
        self._socket.send_multipart([encode(message), *attachments], zmq.NOBLOCK)

    def watch(self, descriptor: int) -> None:
        """From now on `receive` waits no longer once this file descriptor can be read from."""
        self._poller.register(descriptor, zmq.POLLIN)

    def receive(self, timeout_ms: int) -> Envelope | None:
        """The next message, or None when none came in time or the one that came was refused (and counted)."""
        if self._socket not in dict(self._poller.poll(timeout_ms)):
            return None
        frames = self._socket.recv_multipart(copy=False)
        try:
            message = decode(frames[0].buffer)
        except MessageRefused as error:
            self.refused[error.why] += 1
            return None
        return Envelope("controller", message, [frame.buffer for frame in frames[1:]])

    def close(self) -> None:
        """Sends what is left for at most a second, then disconnects."""
        self._close()


class AsyncLink:
    """A `Link` for asyncio processes. `send` never waits; `receive` is awaited by one task."""

    def __init__(self, endpoint: str, name: str) -> None:
        self.name = name
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _configure_link(self._socket, name)
        self._socket.connect(endpoint)
        self._close = weakref.finalize(self, _close, self._socket, self._context)
        self.refused: Counter[str] = Counter()

    def send(self, message: Message, attachments: Sequence[bytes | memoryview] = ()) -> None:
        """Queues a message. Raises zmq.Again when the controller has not taken 4,096 earlier ones."""
        # Through the async socket and not past it: a bare send could swallow the edge that wakes a waiting receive.
        sent = self._socket.send_multipart([encode(message), *attachments], zmq.NOBLOCK)
        cast("asyncio.Future[object]", sent).result()

    async def receive(self) -> Message:
        """The next message; refused ones are counted and passed over."""
        while True:
            frames = await self._socket.recv_multipart(copy=True)
            try:
                return decode(frames[0])
            except MessageRefused as error:
                self.refused[error.why] += 1
                await asyncio.sleep(0)

    def close(self) -> None:
        """Sends what is left for at most a second, then disconnects."""
        self._close()
