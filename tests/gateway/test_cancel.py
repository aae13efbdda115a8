"""However a call ends, the controller is told of a sequence that nobody reads any more."""

from __future__ import annotations

import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool

from airside.controller.gateway import inference
from airside.controller.gateway.streams import TOKENS_MAX
from airside.controller.gateway.text_model import TextModel
from airside.proto.messages import AbortSequence, AddRequest
from tests.gateway.client import Client, events_and_failure, failure
from tests.gateway.conftest import RunningGateway
from tests.gateway.scripted_controller import ScriptedController, batch, finish
from tests.real_processes import wait_until


def test_a_cancelled_call_aborts(client: Client, controller: ScriptedController) -> None:
    call = client.generate(prompt="a")
    request = controller.accept()
    assert next(call).WhichOneof("event") == "accepted"
    call.cancel()
    abort = controller.expect(AbortSequence)
    assert (abort.seq_id, abort.cause) == (request.seq_id, "the client cancelled or is gone")


def test_a_call_cancelled_before_acceptance_aborts(client: Client, controller: ScriptedController) -> None:
    call = client.generate(prompt="a")
    request = controller.expect(AddRequest)
    call.cancel()
    assert controller.expect(AbortSequence).seq_id == request.seq_id


def test_a_client_that_disconnects_aborts(
    gateway: RunningGateway, pool: DescriptorPool, controller: ScriptedController
) -> None:
    channel = grpc.insecure_channel(f"127.0.0.1:{gateway.port}")
    calls = [Client(pool, channel).generate(prompt="a") for _ in range(3)]
    requests = {controller.accept().seq_id for _ in calls}
    channel.close()
    assert {controller.expect(AbortSequence).seq_id for _ in calls} == requests


def test_a_deadline_is_passed_on_and_aborts(client: Client, controller: ScriptedController) -> None:
    before = time.time()
    call = client.generate(prompt="a", timeout=0.6)
    request = controller.accept()
    assert request.deadline is not None
    assert before + 0.5 < request.deadline < time.time() + 0.7  # gRPC rounds timeouts
    abort = controller.expect(AbortSequence)
    assert (abort.seq_id, abort.cause) == (request.seq_id, "deadline")
    assert failure(call).code == grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_deadline_is_counted_when_the_controller_says_what_the_sequence_was_at(
    client: Client, controller: ScriptedController, gateway: RunningGateway
) -> None:
    """By then gRPC has ended the call, and nobody reads that end."""
    call = client.generate(prompt="a", timeout=1, n=2)
    seq_ids = [controller.accept().seq_id for _ in range(2)]
    assert failure(call).code == grpc.StatusCode.DEADLINE_EXCEEDED
    assert {controller.expect(AbortSequence).cause for _ in seq_ids} == {"deadline"}
    ends = [dataclasses.replace(finish(seq_id, "abort", "deadline"), stage="queue") for seq_id in seq_ids]
    cancelled = finish(12345, "abort", "the client cancelled or is gone")
    controller.send(batch(finished=[*ends, cancelled]))
    wait_until(lambda: expired(gateway, "queue") == 2, 20, "the ends")
    assert sum(expired(gateway, stage) for stage in ("check", "images", "prefill", "decode")) == 0


def test_a_deadline_that_passes_during_the_checks_is_counted(
    client: Client, controller: ScriptedController, gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    monkeypatch.setattr(inference, "_THREAD_CHARS", 0)
    monkeypatch.setattr(TextModel, "encode", lambda *_, **__: over.wait(20))
    try:
        assert failure(client.generate(prompt="a", timeout=1)).code == grpc.StatusCode.DEADLINE_EXCEEDED
        wait_until(lambda: expired(gateway, "check") == 1, 20, "the count")
    finally:
        over.set()
    assert controller.poll(AddRequest, timeout_ms=50) is None


def expired(gateway: RunningGateway, stage: str) -> float:
    registry = gateway.gateway._metrics.registry
    return registry.get_sample_value("airside_deadline_expired_total", {"stage": stage}) or 0.0


def test_a_stream_that_ended_is_not_aborted(client: Client, controller: ScriptedController) -> None:
    first = client.generate(prompt="a")
    request = controller.accept()
    controller.send(batch(finished=[finish(request.seq_id)]))
    assert [event.WhichOneof("event") for event in first] == ["accepted", "finished"]
    second = client.generate(prompt="b")
    controller.accept()  # nothing but the next request has come
    second.cancel()


def test_news_of_a_call_that_is_gone_is_dropped(
    client: Client, controller: ScriptedController, gateway: RunningGateway
) -> None:
    call = client.generate(prompt="a")
    request = controller.accept()
    call.cancel()
    controller.expect(AbortSequence)
    controller.send(batch((request.seq_id, [40, 41]), finished=[finish(request.seq_id, "abort")]))
    following = client.generate(prompt="b")
    controller.send(batch(finished=[finish(controller.accept().seq_id)]))
    assert [event.WhichOneof("event") for event in following] == ["accepted", "finished"]
    assert len(gateway.gateway.link.streams) == 0


def test_a_reader_that_stops_is_aborted_and_bounded(
    gateway: RunningGateway, pool: DescriptorPool, controller: ScriptedController
) -> None:
    small_window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16_384)]
    channel = grpc.insecure_channel(f"127.0.0.1:{gateway.port}", small_window)
    call = Client(pool, channel).generate(prompt="a")
    request = controller.accept()
    abort, sent = None, 0
    while abort is None and sent < 5_000_000:
        controller.send(batch((request.seq_id, [40] * 500)), gateway="gateway-0")
        sent += 500
        abort = controller.poll(AbortSequence, timeout_ms=2)
    assert abort is not None
    assert abort.seq_id == request.seq_id
    assert abort.cause == f"the client stopped reading: {TOKENS_MAX} tokens wait for it"
    controller.send(batch((request.seq_id, [40] * 10)))  # too late: dropped
    controller.send(batch(finished=[finish(request.seq_id, "abort", abort.cause)]))
    events, failed = events_and_failure(call)
    received = sum(len(event.delta.token_ids) for event in events)
    assert TOKENS_MAX < received < sent
    assert max(len(event.delta.token_ids) for event in events) <= TOKENS_MAX
    assert events[-1].finished.reason == "abort"
    assert (failed.code, failed.message) == (grpc.StatusCode.CANCELLED, abort.cause)
    channel.close()


def test_a_reader_that_keeps_up_is_not_aborted(client: Client, controller: ScriptedController) -> None:
    call = client.generate(prompt="a")
    request = controller.accept()
    with ThreadPoolExecutor(1) as pool:
        events = pool.submit(list, call)
        for _ in range(100):
            controller.send(batch((request.seq_id, [40] * 500)), gateway="gateway-0")
            assert controller.poll(AbortSequence, timeout_ms=2) is None
        controller.send(batch(finished=[finish(request.seq_id)]), gateway="gateway-0")
        assert sum(len(event.delta.token_ids) for event in events.result(20)) == 50_000


@pytest.mark.parametrize("num_calls", [30])
def test_many_cancels_leave_nothing(
    client: Client, controller: ScriptedController, gateway: RunningGateway, num_calls: int
) -> None:
    calls = [client.generate(prompt="a") for _ in range(num_calls)]
    seq_ids = {controller.accept().seq_id for _ in calls}
    for call in calls:
        call.cancel()
    assert {controller.expect(AbortSequence).seq_id for _ in calls} == seq_ids
    assert len(gateway.gateway.link.streams) == 0
