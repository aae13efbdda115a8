"""Whether a server that is starting is ready, asked as a client would; says every few seconds what it waits for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import grpc

from airside.cluster.client import Client
from airside.cluster.launch_plan import LaunchPlan

Tell = Callable[[str], None]
"""Shows one line to whoever started the server."""

TELL_EVERY_S = 3.0
_ASK_EVERY_S = 0.2
_ANSWER_S = 2.0


class Pool(Protocol):
    """The vision workers, as far as the start is concerned."""

    @property
    def pending(self) -> str:
        """Why there are fewer than wanted; empty when there are not."""


class StartupProgress:
    """Asks a server that is starting how far it is.

    Args:
        plan: what is started.
        client: connected to the address it will serve on.
        vision: the vision workers.
        tell: told when what is waited for changes, and every few seconds.
    """

    def __init__(self, plan: LaunchPlan, client: Client, vision: Pool, tell: Tell) -> None:
        self._plan = plan
        self._client = client
        self._vision = vision
        self._tell = tell
        self._began = self._next_ask = time.monotonic()
        self._waiting_for = ""
        self._next_tell = 0.0

    def is_ready(self) -> bool:
        """Whether requests are served: the engine is ready and, for images, a vision worker or a reason why not."""
        now = time.monotonic()
        if now < self._next_ask:
            return False
        waiting_for = self._ask()
        self._next_ask = time.monotonic() + _ASK_EVERY_S
        if not waiting_for:
            return True
        if waiting_for != self._waiting_for or now >= self._next_tell:
            self._waiting_for, self._next_tell = waiting_for, now + TELL_EVERY_S
            self._tell(f"{waiting_for} … {now - self._began:.1f} s")
        return False

    def _ask(self) -> str:
        """What is missing; empty when nothing is."""
        try:
            info = self._client.info(_ANSWER_S)
            if info.state != "ready":
                return f"loading weights on {self._ranks()}"
            if not self._plan.vision_replicas:
                return ""
            workers = self._client.list_workers(_ANSWER_S).workers
        except grpc.RpcError:
            return "starting the controller, the gateway and the model workers"
        if any(worker.role == "vision_worker" and worker.state in ("ready", "busy") for worker in workers):
            return ""
        if self._vision.pending:
            self._tell(f"serving without vision workers: {self._vision.pending}")
            return ""
        return "starting vision workers"

    def _ranks(self) -> str:
        size = self._plan.config.engine.tensor_parallel_size
        return "1 rank" if size == 1 else f"{size} ranks"
