"""The only file that knows sockets.

The controller binds one `Hub`; every other process connects one `Link` under its own name, which is its address.
Nothing here blocks on a peer: a peer whose outbox is full, or who is gone, makes `send` return False.

On one node that is ipc, where the file's permissions say who may connect. Between nodes it is TCP, encrypted, and only
those who have the run's key are let in (`bus_keys.py`).
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, cast

import zmq
import zmq.asyncio
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from airside.proto.bus_keys import ClientKeys, ServerKeys
from airside.proto.messages import Message, MessageRefused, decode, encode

OUTBOX_MESSAGES_MAX = 4096
"""Messages that may wait for one peer before it counts as stuck."""

CONNECT_MAX_S = 60.0
"""For so long a process on another node tries to reach a controller, which may be starting at the same time."""

_KEEPALIVE_S = 60  # then the system asks whether the other end of a connection is there; it ends minutes later

# Plain numbers: to combine and look up zmq's own costs as much as to send a message.
_NOW, _NOW_AND_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)

_ZAP_DOMAIN = "airside"
_BROKEN = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class ConnectionBroken(ConnectionError):
    """A connection over TCP was never made, was refused, or has ended: messages may be lost, so its process ends."""


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
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._close = weakref.finalize(self, _close, self._context, self._socket)
        self.received: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def listen(self, endpoint: str, keys: ServerKeys) -> None:
        """Also binds `tcp://host:port`, for those who have the keys; tries by others are counted as refused.

        Once only. Raises zmq.ZMQError, with the endpoint, when it is taken or is none of this machine's.
        """
        guard = ThreadAuthenticator(self._context)
        guard.configure_curve_callback(_ZAP_DOMAIN, _Admission(keys.client, self.refused))
        guard.start()
        self._close.detach()
        self._close = weakref.finalize(self, _close, self._context, self._socket, guard)
        # These count for what is bound from now on: the first endpoint stays as it is.
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        self._socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN.encode())
        self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without the guard, nobody is let in
        self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        # The connection of a node that is gone without a word, and what waits for it, would otherwise stay for ever.
        self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_S)
        self._socket.bind(endpoint)

    def receive(self, timeout_ms: int) -> Iterator[Envelope]:
        """Waits at most `timeout_ms` for a first message, then yields all that have come. Refused ones are counted."""
        while self._poller.poll(timeout_ms):  # to receive in vain costs several times as much
            timeout_ms = 0
            try:
                envelope = self._open(_receive_frames(self._socket))
            except zmq.Again:
                return
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
            self._socket.send(peer.encode(), _NOW_AND_MORE)
            if attachments:
                self._socket.send_multipart([frame, *attachments], _NOW, copy=False)
            else:
                self._socket.send(frame, _NOW)
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


def _receive_frames(socket: zmq.Socket[bytes]) -> list[zmq.Frame]:
    """The parts of a message. Raises zmq.Again when none is there."""
    frames = [socket.recv(_NOW, copy=False)]
    while frames[-1].more:
        frames.append(socket.recv(_NOW, copy=False))
    return frames


class _Admission:
    """Who is let in over TCP: asked by the guard's thread, with the public key of one who has proved to own it."""

    def __init__(self, client: str, refused: Counter[str]) -> None:
        self._client = client.encode()
        self._refused = refused

    def callback(self, _domain: str, key: bytes) -> bool:
        if key == self._client:
            return True
        self._refused["unknown_key"] += 1
        return False


def _close(
    context: zmq.Context[Any],
    socket: zmq.Socket[bytes] | zmq.asyncio.Socket,
    other: ThreadAuthenticator | zmq.Socket[bytes] | None = None,
) -> None:
    """For one end of the bus, closed or forgotten: a context that goes before its socket would wait for it for ever."""
    socket.close()
    if isinstance(other, ThreadAuthenticator):
        other.stop()
    elif other is not None:
        other.close(linger=0)
    context.term()


def _configure_link(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, name: str) -> None:
    socket.setsockopt(zmq.IDENTITY, name.encode())
    socket.setsockopt(zmq.SNDHWM, OUTBOX_MESSAGES_MAX)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)


class Link:
    """Any other process's side of the bus: a DEALER socket connected to the controller. One thread only.

    Args:
        endpoint: of the controller.
        name: of this process, its address on the bus.
        keys: for an endpoint of TCP, whose connection must be made in time and not break: what was on its way then
            is lost.
    """

    def __init__(self, endpoint: str, name: str, keys: ClientKeys | None = None) -> None:
        self.name = name
        self._endpoint = endpoint
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _configure_link(self._socket, name)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._connection = None if keys is None else self._use(keys)
        self._socket.connect(endpoint)
        events = None if self._connection is None else self._connection.events
        self._close = weakref.finalize(self, _close, self._context, self._socket, events)
        self.refused: Counter[str] = Counter()

    def _use(self, keys: ClientKeys) -> _Connection:
        """Takes the keys; from then on the connection is watched."""
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server.encode())
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        self._socket.setsockopt(zmq.IPV6, int("[" in self._endpoint))
        connection = _Connection(self._socket, self._endpoint)
        self._poller.register(connection.events, zmq.POLLIN)
        return connection

    def send(self, message: Message, attachments: Sequence[bytes | memoryview] = ()) -> None:
        """Queues a message.

        Raises:
            zmq.Again: the controller has not taken 4,096 earlier ones.
            ConnectionBroken: with keys only.
        """
        try:
            if attachments:
                self._socket.send_multipart([encode(message), *attachments], _NOW)
            else:
                self._socket.send(encode(message), _NOW)
        except zmq.Again:
            # A connection that was refused is not made again: then there is nothing that a message could wait for.
            if self._connection is not None:
                self._connection.check()
            raise

    def watch(self, descriptor: int) -> None:
        """From now on `receive` waits no longer once this file descriptor can be read from."""
        self._poller.register(descriptor, zmq.POLLIN)

    def receive(self, timeout_ms: int) -> Envelope | None:
        """The next message, or None when none came in time or the one that came was refused (and counted).

        Raises:
            ConnectionBroken: with keys only; what came before was received.
        """
        ready = dict(self._poller.poll(timeout_ms))
        if self._socket not in ready:
            if self._connection is None:
                return None
            if not self._socket.poll(0):
                self._connection.check()
            # That the connection was made is said once, and nothing to wake up for.
            return self.receive(timeout_ms) if self._connection.events in ready else None
        try:
            frames = _receive_frames(self._socket)
            message = decode(frames[0].buffer)
        except zmq.Again:
            return None
        except MessageRefused as error:
            self.refused[error.why] += 1
            return None
        return Envelope("controller", message, [frame.buffer for frame in frames[1:]])

    def close(self) -> None:
        """Sends what is left for at most a second, then disconnects."""
        self._close()


class _Connection:
    """What becomes of a link's one connection over TCP. Made before it."""

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        self.events: zmq.Socket[bytes] = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | _BROKEN)
        self._endpoint = endpoint
        self._since: float | None = time.monotonic()  # None: it was made
        self._broken = False

    def check(self) -> None:
        """Raises ConnectionBroken. To be called when no message is there, as what had come before is good, or when
        none can be sent.
        """
        while not self._broken and self.events.poll(0):
            self._broken = recv_monitor_message(self.events)["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._since = None
        if self._broken:
            raise ConnectionBroken(f"the connection to the controller at {self._endpoint} broke, or was refused")
        if self._since is not None and time.monotonic() - self._since > CONNECT_MAX_S:
            raise ConnectionBroken(
                f"no connection to the controller at {self._endpoint} within {CONNECT_MAX_S:g} s: is there a firewall "
                "between the nodes?"
            )


class AsyncLink:
    """A `Link` for asyncio processes. `send` never waits; `receive` is awaited by one task."""

    def __init__(self, endpoint: str, name: str) -> None:
        self.name = name
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _configure_link(self._socket, name)
        self._socket.connect(endpoint)
        self._close = weakref.finalize(self, _close, self._context, self._socket)
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
