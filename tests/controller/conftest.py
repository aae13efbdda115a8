"""A controller in a thread, on a bus of its own, and peers that say what a test tells them to."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from airside.controller.controller import Controller
from airside.proto.channel import Hub
from airside.proto.messages import Message, Shutdown, SupervisorHello
from tests.controller.scripted import PATIENCE_S, Gateway, Peer, Rank, VisionWorker, controller_settings
from tests.real_processes import wait_until

P = TypeVar("P", bound=Peer)


class Bus:
    """One running controller. `start` first, then peers."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/bus"
        self._peers: list[Peer] = []
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.controller: Controller | None = None
        self.hub: Hub | None = None

    def start(self, **changes: object) -> None:
        settings = controller_settings(self.endpoint, **changes)
        self.hub = hub = Hub(self.endpoint)
        self.controller = Controller(settings, hub)
        self._thread = threading.Thread(target=self._run, args=(self.controller, hub))
        self._thread.start()

    def _run(self, controller: Controller, hub: Hub) -> None:
        try:
            with hub:
                controller.run()
        except BaseException as failure:  # told to the test that owns the thread
            self._failure = failure

    def peer(self, kind: Callable[[str, str], P], name: str) -> P:
        peer = kind(self.endpoint, name)
        self._peers.append(peer)
        return peer

    def gateway(self, name: str = "gateway-0") -> Gateway:
        gateway = self.peer(Gateway, name)
        gateway.hello()
        return gateway

    def rank(self, name: str = "worker-0", **hello: int) -> Rank:
        """A rank of a group of one, set up."""
        rank = self.peer(Rank, name)
        rank.hello(**hello)
        rank.set_up()
        return rank

    def vision_worker(self, name: str, credits: int = 1, segment_bytes: int = 0) -> VisionWorker:
        worker = self.peer(VisionWorker, name)
        worker.hello(credits, segment_bytes)
        return worker

    def supervisor(self, name: str = "supervisor") -> Peer:
        """Whose word on processes counts."""
        supervisor = self.peer(Peer, name)
        supervisor.send(SupervisorHello("local", supervisor.pid))
        return supervisor

    def await_received(self, kind: type[Message]) -> None:
        """Until a message of this kind has come; what is sent from now on is handled after it."""
        assert self.hub is not None
        hub = self.hub
        wait_until(lambda: hub.received[kind.__name__] > 0, PATIENCE_S, f"a {kind.__name__}")

    def join(self) -> None:
        """Waits for the controller to end by itself, and raises what it raised."""
        assert self._thread is not None
        self._thread.join(timeout=20)
        assert not self._thread.is_alive(), "the controller does not end"
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        if self.controller is not None:
            self.supervisor("closes").send(Shutdown("the test is over"))
            self.join()
        for peer in self._peers:
            peer.close()


@pytest.fixture
def bus() -> Iterator[Bus]:
    """A bus whose controller is started by the test. What the controller raised fails the test at its end."""
    folder = Path(tempfile.mkdtemp(prefix="airside-bus-"))  # short: ipc paths have at most 107 characters
    made = Bus(folder)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(folder)
