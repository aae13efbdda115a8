"""The offline `LLM` on the bus: the engine's one front end, and the one that notices when a process is gone."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import psutil
import zmq

from airside.cluster.local_processes import LocalProcesses
from airside.proto import messages as msg
from airside.proto.channel import Link

NAME = "offline"
HEARTBEAT_S = 1.0
_POLL_MS = 200
_RETRY_S = 0.01

Reply = TypeVar("Reply", bound=msg.Message)


class OfflineError(RuntimeError):
    """A process of the engine is gone, or did not come up; the message has the end of its log."""


class Session:
    """The connection to the controller of these processes.

    Args:
        endpoint: where it binds the bus.
        processes: the engine's; `receive` looks after them.
    """

    def __init__(self, endpoint: str, processes: LocalProcesses) -> None:
        self._link = Link(endpoint, NAME)
        self._processes = processes
        self._process = psutil.Process()
        self._query_ids = itertools.count(1)
        self._next_beat = 0.0

    def hello(self) -> msg.EngineState:
        """Makes us known: at first, and after a pause in which the controller may have given us up.

        Returns the engine's state. What came before it is of an earlier time, and dropped. Raises OfflineError.
        """
        self.send(msg.GatewayHello("local", os.getpid()))
        while True:
            message = self._next()
            if isinstance(message, msg.EngineState):
                return message

    def send(self, message: msg.Message, attachments: Sequence[bytes] = ()) -> None:
        """Queues a message; waits while the controller has not taken thousands of earlier ones."""
        while True:
            try:
                return self._link.send(message, attachments)
            except zmq.Again:
                self._check_processes()
                time.sleep(_RETRY_S)

    def receive(self) -> msg.Message | None:
        """The next message, or None when none has come for a moment.

        Raises:
            OfflineError: a process has ended, or the controller has let go of us and of what we asked for.
        """
        self._beat()
        message = self._next()
        if isinstance(message, msg.Shutdown):
            raise OfflineError(f"the controller has let go of this process: {message.why}")
        return message

    def await_ready(self, timeout_s: float) -> msg.EngineState:
        """Waits until the engine takes requests. Raises OfflineError."""
        until = time.monotonic() + timeout_s
        message: msg.Message | None = self.hello()
        while time.monotonic() < until:
            if isinstance(message, msg.EngineState) and message.state == "ready":
                return message
            message = self.receive()
        raise OfflineError(f"the engine was not ready after {timeout_s:.0f} s:\n{self._logs()}")

    def ask(self, kind: Callable[[int], msg.Message], reply: type[Reply]) -> Reply:
        """Asks the controller; `kind` makes the message from the query's id. Other messages are dropped meanwhile."""
        self.hello()
        query_id = next(self._query_ids)
        self.send(kind(query_id))
        while True:
            message = self.receive()
            if isinstance(message, reply) and getattr(message, "query_id", None) == query_id:
                return message

    def close(self) -> None:
        """Leaves the bus. Safe to call twice."""
        self._link.close()

    def _next(self) -> msg.Message | None:
        envelope = self._link.receive(_POLL_MS)
        if envelope is None:
            self._check_processes()
        return None if envelope is None else envelope.message

    def _beat(self) -> None:
        """Whatever else is going on: a step's tokens may come faster than silence is ever noticed."""
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + HEARTBEAT_S
            self.send(msg.Heartbeat(self._process.memory_info().rss))

    def _check_processes(self) -> None:
        exited = self._processes.exited()
        if exited:
            raise OfflineError(f"ended by themselves: {exited}\n{self._logs()}")

    def _logs(self) -> str:
        names = sorted(path.stem for path in self._processes.run_dir.glob("*.log"))
        return "\n".join(f"--- {name}\n{self._processes.log(name)[-2000:]}" for name in names)
