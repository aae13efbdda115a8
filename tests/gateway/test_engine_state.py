"""What a gateway does while the engine, or the controller itself, is away."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2

from airside.controller.gateway import controller_link
from airside.controller.gateway.grammar_check import GrammarChecker
from airside.controller.gateway.server import _LAST_WORDS_S
from airside.proto.messages import AbortSequence, EngineState, GatewayHello, Shutdown
from tests.gateway.client import Client, events_and_failure, failure
from tests.gateway.conftest import RunningGateway, Start
from tests.gateway.scripted_controller import READY, ScriptedController, batch, finish

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
RECOVERING = EngineState("recovering", "rank 0 was lost", 100, 1000, vision_ready=True)


def health_of(gateway: RunningGateway) -> dict[str, int]:
    check = gateway.health.Check
    return {name: check(health_pb2.HealthCheckRequest(service=name)).status for name in ("", "engine", "vision")}


def test_health_follows_the_engine(controller: ScriptedController, start_gateway: Start) -> None:
    controller.state = EngineState("starting", "", 100, 0, vision_ready=False)
    gateway = start_gateway()
    assert health_of(gateway) == {"": NOT_SERVING, "engine": NOT_SERVING, "vision": NOT_SERVING}
    controller.send(READY)
    gateway.wait_for_health("", SERVING)
    gateway.wait_for_health("vision", SERVING)
    assert health_of(gateway) == {"": SERVING, "engine": SERVING, "vision": SERVING}
    controller.send(dataclasses.replace(READY, vision_ready=False))
    gateway.wait_for_health("vision", NOT_SERVING)
    assert health_of(gateway) == {"": SERVING, "engine": SERVING, "vision": NOT_SERVING}
    controller.send(RECOVERING)
    gateway.wait_for_health("engine", NOT_SERVING)
    gateway.wait_for_health("", NOT_SERVING)
    controller.send(READY)
    gateway.wait_for_health("", SERVING)


def test_open_streams_wait_while_the_engine_recovers(
    client: Client, gateway: RunningGateway, controller: ScriptedController
) -> None:
    call = client.generate(prompt="a")
    request = controller.accept()
    controller.send(RECOVERING)
    gateway.wait_for_health("", NOT_SERVING)
    failed = failure(client.generate(prompt="b"))
    assert failed.code == grpc.StatusCode.UNAVAILABLE
    assert "the engine is recovering: rank 0 was lost" in failed.message
    assert failed.retry_after_s is not None
    controller.send(READY)
    controller.send(batch((request.seq_id, [40]), finished=[finish(request.seq_id)]))
    assert [event.WhichOneof("event") for event in call] == ["accepted", "delta", "finished"]


@pytest.fixture
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_link, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(controller_link, "PROBE_S", 0.1)
    monkeypatch.setattr(controller_link, "SILENT_S", 1.0)


@pytest.mark.usefixtures("impatience")
def test_a_silent_controller_is_noticed_and_forgiven(
    controller: ScriptedController, start_gateway: Start, pool: DescriptorPool
) -> None:
    gateway = start_gateway()
    client = Client(pool, gateway.channel)
    open_call = client.generate(prompt="a")
    request = controller.accept()
    gateway.wait_for_health("", NOT_SERVING)  # meanwhile the controller reads and says nothing
    failed = failure(client.generate(prompt="b"))
    assert (failed.code, failed.retry_after_s is not None) == (grpc.StatusCode.UNAVAILABLE, True)
    assert "the controller does not answer" in failed.message
    controller.send(batch((request.seq_id, [40]), finished=[finish(request.seq_id)]))
    assert [event.WhichOneof("event") for event in open_call] == ["accepted", "delta", "finished"]
    gateway.wait_for_health("", SERVING)


@pytest.mark.usefixtures("impatience")
def test_a_controller_with_nothing_to_say_is_not_silent(controller: ScriptedController, start_gateway: Start) -> None:
    gateway = start_gateway()
    for _ in range(25):  # more than SILENT_S; only probes are answered
        controller.poll(EngineState, timeout_ms=100)
    assert gateway.gateway.link.is_heard
    assert health_of(gateway)[""] == SERVING


@pytest.mark.usefixtures("impatience")
def test_streams_of_a_lost_controller_end(
    controller: ScriptedController, start_gateway: Start, pool: DescriptorPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_link, "LOST_S", 1.5)
    client = Client(pool, start_gateway().channel)
    call = client.generate(prompt="a", request_id="mine")
    request = controller.accept()
    controller.send(batch((request.seq_id, [40, 41])))
    events, failed = events_and_failure(call)
    assert [event.WhichOneof("event") for event in events] == ["accepted", "delta", "finished"]
    assert events[-1].finished.reason == "abort"
    assert events[-1].finished.usage.completion_tokens == 2
    assert (failed.code, failed.retry_after_s is not None) == (grpc.StatusCode.UNAVAILABLE, True)
    assert "the controller has been silent" in failed.message
    assert controller.expect(AbortSequence).seq_id == request.seq_id


def test_a_controller_that_dismisses_the_gateway_ends_its_streams(
    client: Client, gateway: RunningGateway, controller: ScriptedController
) -> None:
    call = client.generate(prompt="a")
    controller.accept()
    assert next(call).WhichOneof("event") == "accepted"
    controller.send(Shutdown("counted as lost"))
    events, failed = events_and_failure(call)
    assert [event.finished.reason for event in events] == ["abort"]
    assert failed.code == grpc.StatusCode.UNAVAILABLE
    assert "counted as lost" in failed.message
    gateway.wait_until_stopped()


@pytest.mark.usefixtures("impatience")
def test_a_restarted_controller_is_joined_anew(
    controller: ScriptedController, start_gateway: Start, pool: DescriptorPool
) -> None:
    gateway = start_gateway()
    client = Client(pool, gateway.channel)
    call = client.generate(prompt="a")
    lost = controller.accept()
    controller.gateways.clear()  # as one would that has just started
    controller.state = dataclasses.replace(READY, state="starting")
    controller.expect(GatewayHello)
    gateway.wait_for_health("", NOT_SERVING)
    events, failed = events_and_failure(call)
    assert [event.WhichOneof("event") for event in events] == ["accepted", "finished"]
    assert (failed.code, failed.message.split(";")[0]) == (
        grpc.StatusCode.UNAVAILABLE,
        "the controller was restarted",
    )
    assert controller.expect(AbortSequence).seq_id == lost.seq_id
    controller.send(READY)
    gateway.wait_for_health("", SERVING)
    following = client.generate(prompt="b")
    controller.send(batch(finished=[finish(controller.accept().seq_id)]))
    assert [event.WhichOneof("event") for event in following] == ["accepted", "finished"]


def test_a_stop_waits_for_a_request_that_is_still_being_checked(
    client: Client, gateway: RunningGateway, controller: ScriptedController, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_checked = threading.Event()

    async def check(*_: object) -> str:
        gateway.begin_stop()
        await asyncio.sleep(2 * _LAST_WORDS_S)  # more than what is left to calls that are not waited for
        is_checked.set()
        return "grammar"

    monkeypatch.setattr(GrammarChecker, "check", check)
    call = client.generate(prompt="a", structure={"regex": "a"})
    request = controller.accept()
    assert is_checked.is_set()
    controller.send(batch(finished=[finish(request.seq_id)]))
    assert [event.WhichOneof("event") for event in call] == ["accepted", "finished"]
    gateway.wait_until_stopped()


def test_gateways_share_a_controller(
    controller: ScriptedController, start_gateway: Start, pool: DescriptorPool
) -> None:
    gateways = [start_gateway(name=f"gateway-{i}") for i in range(2)]
    calls = [
        Client(pool, gateway.channel).generate(prompt="a", request_id=f"r{i}") for i, gateway in enumerate(gateways)
    ]
    requests = [controller.accept() for _ in calls]
    senders = {request.request_id: f"gateway-{request.request_id[1:]}" for request in requests}
    assert sorted(controller.gateways) == ["gateway-0", "gateway-1"]
    assert len({request.seq_id >> 32 for request in requests}) == 2
    assert all(0 <= request.seq_id < 1 << 63 for request in requests)
    for token, request in enumerate(requests, 40):
        ends = [finish(request.seq_id, detail=request.request_id)]
        controller.send(batch((request.seq_id, [token]), finished=ends), gateway=senders[request.request_id])
    for i, call in enumerate(calls):
        assert list(call)[-1].finished.detail == f"r{i}"


def test_gateways_share_a_port(start_gateway: Start) -> None:
    first = start_gateway(reuse_port=True)
    second = start_gateway(name="gateway-1", port=first.port, reuse_port=True)
    assert second.port == first.port
