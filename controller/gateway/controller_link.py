"""The gateway's side of the bus: hello, heartbeats, queries, and whether the controller is there at all.

A controller with nothing to do says nothing, so every `PROBE_S` it is asked for its peers. One that does not name this
gateway among them was restarted: streams end, and the gateway says hello again. One that counts the gateway as lost
says `Shutdown`.

    heard ── SILENT_S without a word ──> silent: new calls are UNAVAILABLE, open streams wait
    silent ── LOST_S ──> lost: open streams end.      Any word from the controller ──> heard
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol, TypeVar

import psutil
import zmq

from airside.controller.gateway.errors import ControllerSilent, unavailable
from airside.controller.gateway.request_metrics import RequestMetrics
from airside.controller.gateway.streams import Streams
from airside.proto.messages import (
    AbortOutcome,
    AbortSequence,
    EngineState,
    GatewayHello,
    Gauges,
    Heartbeat,
    ImagesCounted,
    Message,
    Peers,
    PeersQuery,
    ScaleVisionOutcome,
    Shutdown,
    StopSequence,
)

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
PROBE_S = 2.0
SILENT_S = 6.0
LOST_S = 60.0
QUERY_TIMEOUT_S = 5.0
ENDINGS_OWED_MAX = 65_536

Reply = TypeVar("Reply", bound=Message)


class Bus(Protocol):
    """What is needed of `AsyncLink`."""

    def send(self, message: Message, attachments: Sequence[bytes | memoryview] = ()) -> None: ...

    async def receive(self) -> Message: ...

    @property
    def name(self) -> str: ...


class ControllerLink:
    """Talks with the controller; knows the engine's state and the live streams.

    Args:
        bus: the connected link.
        hello: how this gateway introduces itself.
        metrics: told when tokens come.
    """

    def __init__(self, bus: Bus, hello: GatewayHello, metrics: RequestMetrics) -> None:
        self._bus = bus
        self._hello = hello
        self._process = psutil.Process()
        self._query_ids = itertools.count(1)
        self._probe_ids = itertools.count(-1, -1)
        self._queries: dict[int, asyncio.Future[Message]] = {}
        self._endings_owed: deque[AbortSequence | StopSequence] = deque(maxlen=ENDINGS_OWED_MAX)
        self._state: EngineState | None = None
        self._heard_at = time.monotonic()
        self._lost = False
        self.streams = Streams(self.abort, metrics)
        self.changed = asyncio.Event()
        """Set whenever `state` or `is_heard` may have changed; cleared by whoever watches."""
        self.shutdown = asyncio.Event()
        """Set when the controller asks this process to finish."""

    @property
    def state(self) -> EngineState | None:
        """What the controller last said about the engine; None before its first word and while it is silent."""
        return self._state if self.is_heard else None

    @property
    def is_heard(self) -> bool:
        """Whether the controller has said anything lately."""
        return self._state is not None and time.monotonic() - self._heard_at < SILENT_S

    def ready_state(self) -> EngineState:
        """The state of an engine that takes requests.

        Raises:
            RequestError: UNAVAILABLE: it takes none now; the message says why.
        """
        state = self.state
        if state is None:
            raise unavailable("the controller does not answer; try again later")
        if state.state != "ready":
            why = f": {state.detail}" if state.detail else ""
            raise unavailable(f"the engine is {state.state}{why}; try again later")
        return state

    def send(self, message: Message, attachments: Sequence[bytes | memoryview] = ()) -> None:
        """Queues a message. Raises ControllerSilent when earlier ones are not taken."""
        try:
            self._bus.send(message, attachments)
        except zmq.Again as error:
            raise ControllerSilent("the controller takes no messages; try again later") from error

    def abort(self, seq_id: int, cause: str) -> None:
        """Ends a sequence. Never fails: what cannot be sent now is sent with the next heartbeat."""
        self._end(AbortSequence(seq_id, cause))

    def stop(self, seq_id: int, num_tokens: int, detail: str) -> None:
        """Ends a sequence at its own text, after so many output tokens. Never fails, as `abort`."""
        self._end(StopSequence(seq_id, num_tokens, detail))

    def _end(self, message: AbortSequence | StopSequence) -> None:
        try:
            self.send(message)
        except ControllerSilent:
            self._endings_owed.append(message)

    async def query(
        self, kind: Callable[[int], Message], reply: type[Reply], attachments: Sequence[bytes] = ()
    ) -> Reply:
        """Asks the controller. `kind` makes the message from the query's id.

        Raises:
            ControllerSilent: no answer within `QUERY_TIMEOUT_S`.
        """
        return await self._ask(next(self._query_ids), kind, reply, attachments)

    async def _ask(
        self, query_id: int, kind: Callable[[int], Message], reply: type[Reply], attachments: Sequence[bytes] = ()
    ) -> Reply:
        future = self._queries[query_id] = asyncio.get_running_loop().create_future()
        try:
            self.send(kind(query_id), attachments)
            answer = await asyncio.wait_for(future, QUERY_TIMEOUT_S)
        except TimeoutError as error:
            raise ControllerSilent("the controller does not answer; try again later") from error
        finally:
            del self._queries[query_id]
        assert isinstance(answer, reply)
        return answer

    async def run(self) -> NoReturn:
        """Says hello, then hands on what the controller says, for ever."""
        self._bus.send(self._hello)
        while True:
            message = await self._bus.receive()
            self._heard_at = time.monotonic()
            if not self.streams.dispatch(message):
                self._handle(message)

    async def keep_alive(self) -> NoReturn:
        """Heartbeats, and the watch over a silent controller, for ever."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                self._beat()
            except ControllerSilent as error:
                log.warning("heartbeat not sent: %s", error)
            self._watch()

    async def watch_membership(self) -> NoReturn:
        """Asks every `PROBE_S` whether the controller knows this gateway, and introduces it where not, for ever."""
        while True:
            await asyncio.sleep(PROBE_S)
            try:
                peers = await self._ask(next(self._probe_ids), PeersQuery, Peers)
                if not any(row.name == self._bus.name for row in peers.peers):
                    self._join_anew()
            except ControllerSilent as error:
                log.warning("probe failed: %s", error)

    def _join_anew(self) -> None:
        log.warning("controller restarted: ending %d streams", len(self.streams))
        self.streams.lose_all("the controller was restarted")
        self._state = None
        self.changed.set()
        self.send(self._hello)

    def _beat(self) -> None:
        while self._endings_owed:
            self.send(self._endings_owed[0])
            self._endings_owed.popleft()
        self.send(Heartbeat(self._process.memory_info().rss))

    def _watch(self) -> None:
        self.changed.set()  # no message tells of silence
        silence_s = time.monotonic() - self._heard_at
        if silence_s < LOST_S:
            self._lost = False
        elif not self._lost:
            self._lost = True
            log.error("controller silent for %.0f s: ending %d streams", silence_s, len(self.streams))
            self.streams.lose_all(f"the controller has been silent for {silence_s:.0f} s")

    def _handle(self, message: Message) -> None:
        match message:
            case EngineState():
                self._take_state(message)
            case AbortOutcome() | ScaleVisionOutcome() | Gauges() | Peers() | ImagesCounted():
                future = self._queries.get(message.query_id)
                if future is not None and not future.done():
                    future.set_result(message)
            case Shutdown():
                log.info("shutdown asked by the controller: %s", message.why)
                # It has let go of this gateway's sequences; no more will be heard of them.
                self.streams.lose_all(f"the controller has let go of this gateway: {message.why}")
                self.shutdown.set()
            case _:
                log.error("unexpected message from the controller: %s", type(message).__name__)

    def _take_state(self, state: EngineState) -> None:
        previous, self._state = self._state, state
        self.changed.set()
        if previous != state:
            log.info("engine state=%s detail=%r vision_ready=%s", state.state, state.detail, state.vision_ready)
