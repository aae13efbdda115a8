"""The controller among strange, stuck and silent peers; its own end."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from airside.controller import controller
from airside.proto import messages as msg
from airside.proto.codec import VERSION, encode
from tests.controller.conftest import Bus
from tests.controller.scripted import Gateway, Peer, Rank, VisionWorker, controller_settings


def test_what_is_not_understood_is_counted(bus: Bus) -> None:
    bus.start()
    gateway, stranger = bus.gateway(), bus.peer(Peer, "stranger")
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    try:
        socket.connect(bus.endpoint)
        socket.send(bytes((VERSION,)) + b"\x91\xcc\xfa")  # kind 250
        stranger.send(msg.KvSetup(3))  # known, but nothing to say to a controller
        stranger.send(msg.GaugesQuery(1))
        stranger.expect(msg.Gauges)
        while "unknown_kind" not in (refused := gateway.gauges().bus_messages_refused):
            gateway.link.receive(20)
        assert refused == {"unknown_kind": 1, "unexpected_KvSetup": 1}
    finally:
        socket.close(linger=0)


def test_an_abort_of_an_id_that_no_sequence_can_have_changes_nothing(bus: Bus) -> None:
    bus.start()
    gateway, _ = bus.gateway(), bus.rank()
    gateway.wait_ready()
    for seq_id in (-5, 2**63):
        gateway.send(msg.AbortSequence(seq_id, "no such sequence"))
    gateway.add(1)
    gateway.accepted(1)


def test_a_gateway_that_stops_reading_blocks_nobody(bus: Bus) -> None:
    bus.start()
    gateway, rank = bus.gateway(), bus.rank()
    gateway.wait_ready()
    stuck: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    stuck.setsockopt(zmq.IDENTITY, b"stuck")
    stuck.setsockopt(zmq.RCVHWM, 1)
    stuck.setsockopt(zmq.RCVBUF, 4096)
    stuck.setsockopt(zmq.SNDHWM, 0)
    try:
        stuck.connect(bus.endpoint)
        stuck.send(encode(msg.GatewayHello("local", 1)))
        gateway.await_peer("stuck", "ready")
        for query_id in range(8000):  # more answers than its outbox and the kernel's buffers hold
            stuck.send(encode(msg.GaugesQuery(query_id)))
        gateway.await_peer("stuck", "lost")
        gateway.add(1, max_tokens=1)
        rank.step()
        assert gateway.finish(1)[0] == [1000]
    finally:
        stuck.close(linger=0)


def test_peers_are_listed(bus: Bus) -> None:
    bus.start()
    gateway, rank = bus.gateway(), bus.rank()
    bus.vision_worker("vision-0")
    rank.send(msg.Heartbeat(123_456))
    rank.send(msg.GaugesQuery(1))
    rank.expect(msg.Gauges)
    gateway.wait_ready(vision=True)
    rows = gateway.peers()
    assert {name: (row.role, row.state) for name, row in rows.items()} == {
        "controller": ("controller", "ready"),
        "gateway-0": ("gateway", "ready"),
        "worker-0": ("worker", "ready"),
        "vision-0": ("vision_worker", "ready"),
    }
    assert (rows["worker-0"].rss_bytes, rows["worker-0"].pid) == (123_456, rank.pid)
    assert rows["controller"].rss_bytes > 0


def test_peers_are_listed_while_strangers_take_up_all_file_descriptors(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    bus.start()
    gateway = bus.gateway()
    gateway.peers()
    monkeypatch.setattr(controller, "psutil", SimpleNamespace(Process=no_more))
    assert gateway.peers()["controller"].rss_bytes > 0  # as of before


def test_shutdown_ends_every_request_and_sends_everyone_home(bus: Bus) -> None:
    bus.start()
    gateway, rank, vision = bus.gateway(), bus.rank(), bus.vision_worker("vision-0")
    gateway.wait_ready(vision=True)
    gateway.add(1, max_tokens=100)
    gateway.add(2, (7,), b"picture")
    rank.plan()
    vision.job()
    bus.supervisor().send(msg.Shutdown("airside down"))
    ends = [gateway.finish(seq_id)[1] for seq_id in (1, 2)]
    assert {(end.reason, end.detail) for end in ends} == {("abort", "server is shutting down")}
    assert (rank.expect(msg.Shutdown).why, vision.expect(msg.Shutdown).why) == ("airside down", "airside down")
    bus.join()


def test_the_process_serves_and_ends_with_exit_code_0_on_sigterm() -> None:
    with tempfile.TemporaryDirectory(prefix="airside-bus-") as folder:
        endpoint = f"ipc://{folder}/bus"
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "airside.controller", "--settings", controller_settings(endpoint).to_json()]
        with log.open("wb") as stderr:
            process = subprocess.Popen(command, stderr=stderr)
        gateway, rank = Gateway(endpoint, "gateway-0"), Rank(endpoint, "worker-0")
        try:
            gateway.hello()
            rank.hello()
            rank.set_up()
            gateway.wait_ready()
            gateway.add(1, max_tokens=100)
            rank.step()
            process.send_signal(signal.SIGTERM)
            assert gateway.finish(1)[1].reason == "abort"
            assert process.wait(timeout=20) == 0
        finally:
            process.kill()
            process.wait()
            gateway.close()
            rank.close()
        assert "controller_stopping why=SIGTERM live_sequences=1" in log.read_text()


def test_a_segment_name_is_not_taken_twice(bus: Bus) -> None:
    bus.start()
    gateway, vision = bus.gateway(), bus.vision_worker("vision-0")
    gateway.expect(msg.EngineState, lambda state: state.vision_ready)
    vision.send(msg.VisionHello("local", vision.pid + 1, vision.segment))
    vision.expect(msg.Shutdown)
    # States are told once a turn: one that came and went in between would be no news.
    gateway.expect(msg.EngineState, lambda state: not state.vision_ready)
    again = bus.peer(VisionWorker, "vision-0-again")
    again.hello()
    gateway.expect(msg.EngineState, lambda state: state.vision_ready)
