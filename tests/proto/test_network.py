"""The bus between nodes: who has the run's key is heard, nobody else is, and on one node all is as without."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from airside.proto import channel
from airside.proto.bus_keys import ClientKeys, ServerKeys, make_keys
from airside.proto.channel import OUTBOX_MESSAGES_MAX, ConnectionBroken, Hub, Link
from airside.proto.messages import Credit, Heartbeat, Job
from airside.proto.settings import VisionWorkerSettings
from tests.proto.test_channel import receive_one
from tests.real_processes import free_port, wait_until

PATIENCE_MS = 20_000
QUIET_MS = 700  # far longer than a handshake on this machine


class Bus:
    """A hub with both endpoints, and the keys of its run."""

    def __init__(self, folder: Path) -> None:
        self.server, self.client = make_keys()
        self.local = f"ipc://{folder}/bus"
        self.network = f"tcp://127.0.0.1:{free_port()}"
        self.hub = Hub(self.local)
        self.hub.listen(self.network, self.server)


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[Bus]:
    made = Bus(tmp_path)
    yield made
    made.hub.close()


class Wire:
    """Between a link and the hub: passes on what goes through, and keeps it."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.removeprefix("tcp://").split(":")
        self._there = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = [self._listener]
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.seen = bytearray()
        threading.Thread(target=self._connect, daemon=True).start()

    def _connect(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(self._there)
        self._ends += [near, far]
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=self._copy, args=(source, target), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                self.seen += data
                target.sendall(data)

    def cut(self) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def say_hello(bus: Bus, link: Link) -> None:
    """Both sides hear one another."""
    link.send(Credit(1), [b"picture"])
    envelope = receive_one(bus.hub)
    assert (envelope.peer, envelope.message, bytes(envelope.attachments[0])) == (link.name, Credit(1), b"picture")
    assert bus.hub.send(link.name, Job(1, 0, 1), [memoryview(b"x" * 1_000_000)])
    answer = link.receive(PATIENCE_MS)
    assert answer is not None
    assert (answer.message, len(answer.attachments[0])) == (Job(1, 0, 1), 1_000_000)


def fill(link: Link) -> None:
    """Sends more than can wait. A link that was refused has no room at all, or little while it tries again."""
    for _ in range(2 * OUTBOX_MESSAGES_MAX):
        link.send(Credit(1))


def is_heard(bus: Bus, link: Link) -> bool:
    """Whether a message comes through within a time that is long for one that may."""
    link.send(Credit(1))
    until = time.monotonic() + QUIET_MS / 1000
    return any([*bus.hub.receive(50)] for _ in iter(lambda: time.monotonic() < until, False))


def test_with_the_key_over_tcp_and_without_over_ipc(bus: Bus) -> None:
    far, near = Link(bus.network, "vision-1", bus.client), Link(bus.local, "vision-0")
    say_hello(bus, far)
    say_hello(bus, near)
    far.close()
    near.close()
    assert not bus.hub.refused


def strangers() -> dict[str, ClientKeys | None]:
    _, other = make_keys()
    return {"no key": None, "a key of another run": other}


@pytest.mark.parametrize("name", strangers())
def test_a_stranger_is_not_heard_and_gets_nothing(bus: Bus, name: str) -> None:
    stranger = Link(bus.network, "vision-0", strangers()[name])
    assert not is_heard(bus, stranger)
    assert bus.hub.send("vision-0", Job(1, 0, 1)) is False
    stranger.close()


def test_who_knows_the_server_but_has_another_secret_is_refused_counted_and_told(bus: Bus) -> None:
    _, other = make_keys()
    thief = Link(bus.network, "vision-0", ClientKeys(bus.client.server, other.secret))
    with pytest.raises(ConnectionBroken, match=bus.network):
        thief.receive(PATIENCE_MS)
    assert bus.hub.refused["unknown_key"] >= 1
    with pytest.raises(ConnectionBroken, match=bus.network):
        fill(thief)
    assert not [*bus.hub.receive(QUIET_MS)]
    assert bus.hub.send("vision-0", Job(1, 0, 1)) is False
    thief.close()


def test_a_stranger_cannot_take_over_a_name(bus: Bus) -> None:
    """A new connection of the same name is preferred to the old one: among those who are let in."""
    own = Link(bus.network, "vision-0", bus.client)
    say_hello(bus, own)
    stranger = Link(bus.network, "vision-0")
    assert not is_heard(bus, stranger)
    say_hello(bus, own)
    own.close()
    stranger.close()


def test_keys_are_of_no_use_to_the_local_socket(bus: Bus) -> None:
    link = Link(bus.local, "vision-0", bus.client)
    assert not is_heard(bus, link)
    link.close()


def test_nothing_can_be_read_on_the_way(bus: Bus) -> None:
    wire = Wire(bus.network)
    link = Link(wire.endpoint, "vision-0", bus.client)
    say_hello(bus, link)
    assert len(wire.seen) > 1_000_000
    assert b"picture" not in wire.seen
    assert b"x" * 16 not in wire.seen
    link.close()
    wire.cut()


def test_a_wire_that_is_cut_is_an_error(bus: Bus) -> None:
    wire = Wire(bus.network)
    link = Link(wire.endpoint, "vision-0", bus.client)
    say_hello(bus, link)
    wire.cut()
    with pytest.raises(ConnectionBroken, match=wire.endpoint):
        link.receive(PATIENCE_MS)
    link.close()


def test_a_connection_that_breaks_is_an_error_after_what_had_come(tmp_path: Path) -> None:
    bus = Bus(tmp_path)
    link = Link(bus.network, "vision-0", bus.client)
    say_hello(bus, link)
    assert bus.hub.send("vision-0", Heartbeat(7))
    bus.hub.close()
    envelope = link.receive(PATIENCE_MS)
    assert envelope is not None
    assert envelope.message == Heartbeat(7)
    with pytest.raises(ConnectionBroken, match=f"the connection to the controller at {bus.network} broke"):
        link.receive(PATIENCE_MS)
    link.close()


def test_the_controller_may_come_later_and_again(tmp_path: Path) -> None:
    server, client = make_keys()
    network = f"tcp://127.0.0.1:{free_port()}"
    for _ in range(2):
        link = Link(network, "vision-0", client)
        link.send(Credit(1))
        assert link.receive(300) is None  # nobody listens yet, which is no break
        with Hub(f"ipc://{tmp_path}/bus") as hub:
            hub.listen(network, server)
            assert receive_one(hub).peer == "vision-0"
        link.close()


def test_a_node_that_is_gone_without_a_word_keeps_no_connection(bus: Bus) -> None:
    link = Link(bus.network, "vision-0", bus.client)
    say_hello(bus, link)
    port = f":{int(bus.network.rpartition(':')[2]):04X}"

    def are_kept_alive() -> bool:  # timer 2 of proc_net_tcp(5), once nothing is on its way
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        timers = [row[5][:2] for row in rows if row[1].endswith(port) and row[3] == "01"]
        return timers == ["02"]

    wait_until(are_kept_alive, PATIENCE_MS / 1000, "the system watches over the connection")
    link.close()


def test_a_controller_that_is_never_reached_is_an_error(monkeypatch: pytest.MonkeyPatch, bus: Bus) -> None:
    lost, found = Link(f"tcp://127.0.0.1:{free_port()}", "vision-0", bus.client), Link(bus.network, "v", bus.client)
    say_hello(bus, found)
    monkeypatch.setattr(channel, "CONNECT_MAX_S", 0.0)
    with pytest.raises(ConnectionBroken, match=r"no connection to the controller at tcp://.* a firewall"):
        lost.receive(50)
    assert found.receive(50) is None
    lost.close()
    found.close()


def test_a_port_that_is_taken_is_an_error_and_the_hub_can_be_closed(bus: Bus, tmp_path: Path) -> None:
    with Hub(f"ipc://{tmp_path}/other") as hub, pytest.raises(zmq.ZMQError, match=bus.network):
        hub.listen(bus.network, bus.server)


def test_secrets_are_in_no_repr() -> None:
    server, client = make_keys()
    settings = VisionWorkerSettings("tcp://h:1", "vision-0", "/m", "airside-s", 1, 1, 1, 1.0)
    settings = VisionWorkerSettings(
        **json.loads(settings.to_json()) | {"network_server": client.server, "network_secret": client.secret}
    )
    assert settings.network_keys == client
    assert VisionWorkerSettings.from_json(settings.to_json()) == settings
    shown = f"{server} {client} {settings}"
    assert server.secret not in shown
    assert client.secret not in shown
    assert ServerKeys(server.secret, client.public) == server
