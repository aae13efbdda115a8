from __future__ import annotations

import importlib.metadata
import os

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool

from airside.controller.gateway import control, controller_link
from airside.proto import messages as msg
from tests.gateway.client import Client, failure
from tests.gateway.conftest import Start
from tests.gateway.scripted_controller import MAX_MODEL_LEN, ScriptedController
from tests.gateway.tiny_checkpoint import byte_level_tokenizer


def test_server_info(client: Client, controller: ScriptedController) -> None:
    call = client.start("Control", "GetServerInfo")
    query = controller.expect(msg.GaugesQuery)
    gauges = {
        "num_requests_running": 4,
        "controller_step_s": 0.25,
        "num_preemptions": 2**40,
        "prefix_cache_hits": 2**40 + 1,
        "of_a_newer_version": 1.0,
    }
    controller.send(msg.Gauges(query.query_id, gauges, {"stop": 5}, {"malformed": 6}, {"schedule": 0.5}))
    info = call.result(20)
    assert info.version == importlib.metadata.version("airside")
    assert (info.model, info.architecture, info.device, info.dtype) == ("tiny", "TinyForCausalLM", "cpu", "float32")
    assert (info.state, info.accepts_images, info.image_mark) == ("ready", True, "<image>")
    assert (info.max_model_len, info.tensor_parallel_size) == (MAX_MODEL_LEN, 2)
    assert info.vocab_size == byte_level_tokenizer().get_vocab_size(with_added_tokens=True)
    assert (info.gauges.num_requests_running, info.gauges.num_preemptions) == (4, 2**40)
    assert info.gauges.controller_step_s == 0.25
    assert dict(info.gauges.requests_finished) == {"stop": 5}
    assert dict(info.gauges.bus_messages_refused) == {"malformed": 6}
    assert dict(info.gauges.controller_phase_s) == {"schedule": 0.5}
    assert info.gauges.prefix_cache_hits == 2**40 + 1


def test_load(client: Client, controller: ScriptedController) -> None:
    call = client.start("Control", "GetLoad")
    gauges = {"num_requests_running": 4, "num_requests_waiting": 9, "kv_blocks_live": 2, "kv_blocks_total": 8}
    gauges |= {"vision_queue_depth": 3, "vision_wait_s": 0.5}
    controller.send(msg.Gauges(controller.expect(msg.GaugesQuery).query_id, gauges, {}, {}))
    load = call.result(20)
    assert (load.state, load.num_requests_running, load.num_requests_waiting) == ("ready", 4, 9)
    assert (load.kv_cache_usage_ratio, load.vision_queue_depth, load.vision_wait_s) == (0.25, 3, 0.5)


def test_the_load_is_asked_for_once_while_it_is_new(
    client: Client, controller: ScriptedController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "LOAD_AGE_S", 1000.0)
    calls = [client.start("Control", "GetLoad") for _ in range(3)]
    query = controller.expect(msg.GaugesQuery)
    controller.send(msg.Gauges(query.query_id, {"num_requests_running": 4}, {}, {}))
    calls.append(client.start("Control", "GetLoad"))
    assert [call.result(20).num_requests_running for call in calls] == [4] * 4


def test_the_load_is_asked_for_again_once_it_is_old(
    client: Client, controller: ScriptedController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "LOAD_AGE_S", 0.0)
    for running in (4, 5):
        call = client.start("Control", "GetLoad")
        query = controller.expect(msg.GaugesQuery)
        controller.send(msg.Gauges(query.query_id, {"num_requests_running": running}, {}, {}))
        assert call.result(20).num_requests_running == running


def test_the_load_of_a_controller_without_an_engine(client: Client, controller: ScriptedController) -> None:
    call = client.start("Control", "GetLoad")
    controller.send(msg.Gauges(controller.expect(msg.GaugesQuery).query_id, {}, {}, {}))
    assert call.result(20).kv_cache_usage_ratio == 0


def test_workers(client: Client, controller: ScriptedController) -> None:
    call = client.start("Control", "ListWorkers")
    query = controller.expect(msg.PeersQuery)
    row = msg.PeerRow("vision_worker", "vision-1", 0, "node", 42, "busy", 0.5, 17, 2**33)
    controller.send(msg.Peers(query.query_id, [row], 3, "waiting for a CPU"))
    reply = call.result(20)
    (worker,) = reply.workers
    assert (worker.role, worker.name, worker.rank, worker.node, worker.pid) == (
        "vision_worker",
        "vision-1",
        0,
        "node",
        42,
    )
    assert (worker.state, worker.last_heard_s, worker.jobs_done, worker.rss_bytes) == ("busy", 0.5, 17, 2**33)
    assert (reply.vision_target, reply.vision_pending) == (3, "waiting for a CPU")


@pytest.mark.parametrize("outcome", ["aborted", "already_finished", "unknown"])
def test_abort(client: Client, controller: ScriptedController, outcome: str) -> None:
    call = client.start("Control", "Abort", request_id="東京 1")
    query = controller.expect(msg.AbortByName)
    assert query.request_id == "東京 1"
    controller.send(msg.AbortOutcome(query.query_id, outcome))
    assert call.result(20).outcome == outcome


def test_abort_without_an_id(client: Client) -> None:
    failed = failure(client.start("Control", "Abort"))
    assert (failed.code, failed.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["request_id"])


def test_scale_vision(client: Client, controller: ScriptedController) -> None:
    call = client.start("Control", "ScaleVision", replicas=5)
    query = controller.expect(msg.ScaleVision)
    assert (query.replicas, query.replicas_max) == (5, None)
    controller.send(msg.ScaleVisionOutcome(query.query_id, 5, ""))
    assert (call.result(20).replicas, call.result(20).replicas_max) == (5, 5)


def test_scale_vision_to_none(client: Client, controller: ScriptedController) -> None:
    call = client.start("Control", "ScaleVision", replicas=0)
    query = controller.expect(msg.ScaleVision)
    assert (query.replicas, query.replicas_max) == (0, None)
    controller.send(msg.ScaleVisionOutcome(query.query_id, 0, ""))
    assert (call.result(20).replicas, call.result(20).replicas_max) == (0, 0)


def test_scale_vision_within_a_range(client: Client, controller: ScriptedController) -> None:
    call = client.start("Control", "ScaleVision", range={"min": 0, "max": 3})
    query = controller.expect(msg.ScaleVision)
    assert (query.replicas, query.replicas_max) == (0, 3)
    controller.send(msg.ScaleVisionOutcome(query.query_id, 0, "", replicas_max=3))
    assert (call.result(20).replicas, call.result(20).replicas_max) == (0, 3)
    call = client.start("Control", "ScaleVision", range={"min": 0, "max": 9})
    query = controller.expect(msg.ScaleVision)
    controller.send(msg.ScaleVisionOutcome(query.query_id, 0, "at most 4", is_out_of_range=True))
    assert failure(call).fields == ["range"]


@pytest.mark.parametrize("size", [{"min": 2, "max": 1}, {"min": -1, "max": 1}])
def test_scale_vision_within_no_range(client: Client, size: dict[str, int]) -> None:
    failed = failure(client.start("Control", "ScaleVision", range=size))
    assert (failed.code, failed.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["range"])
    assert f"is {size['min']} to {size['max']}, but must be rising" in failed.message


def test_scale_vision_without_a_size(client: Client) -> None:
    failed = failure(client.start("Control", "ScaleVision"))
    assert (failed.code, failed.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["size"])


def test_scale_vision_refused(client: Client, controller: ScriptedController) -> None:
    call = client.start("Control", "ScaleVision", replicas=5)
    query = controller.expect(msg.ScaleVision)
    controller.send(msg.ScaleVisionOutcome(query.query_id, 1, "no supervisor is running"))
    failed = failure(call)
    assert (failed.code, failed.message) == (grpc.StatusCode.FAILED_PRECONDITION, "no supervisor is running")
    too_many = client.start("Control", "ScaleVision", replicas=5)
    query = controller.expect(msg.ScaleVision)
    controller.send(
        msg.ScaleVisionOutcome(
            query.query_id, 1, "at most 4 (vision.autoscaling_config.max_replicas)", is_out_of_range=True
        )
    )
    failed = failure(too_many)
    assert (failed.code, failed.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["replicas"])
    assert failed.message == "at most 4 (vision.autoscaling_config.max_replicas)"
    negative = failure(client.start("Control", "ScaleVision", replicas=-1))
    assert (negative.code, negative.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["replicas"])


def test_answers_find_their_questions(client: Client, controller: ScriptedController) -> None:
    calls = [client.start("Control", "Abort", request_id=name) for name in ("a", "b")]
    queries = [controller.expect(msg.AbortByName) for _ in calls]
    for query in reversed(queries):
        controller.send(msg.AbortOutcome(query.query_id, f"outcome of {query.request_id}"))
    assert [call.result(20).outcome for call in calls] == ["outcome of a", "outcome of b"]


def test_a_controller_that_does_not_answer(
    client: Client, controller: ScriptedController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_link, "QUERY_TIMEOUT_S", 0.05)
    failed = failure(client.start("Control", "ListWorkers"))
    assert failed.code == grpc.StatusCode.UNAVAILABLE
    assert "the controller does not answer" in failed.message
    assert failed.retry_after_s is not None
    late = controller.expect(msg.PeersQuery)
    controller.send(msg.Peers(late.query_id, [], 0, ""))  # nobody waits for it any more
    monkeypatch.undo()
    call = client.start("Control", "Abort", request_id="x")
    controller.send(msg.AbortOutcome(controller.expect(msg.AbortByName).query_id, "unknown"))
    assert call.result(20).outcome == "unknown"


def test_heartbeats_say_how_large_the_gateway_is(
    monkeypatch: pytest.MonkeyPatch, controller: ScriptedController, start_gateway: Start
) -> None:
    monkeypatch.setattr(controller_link, "HEARTBEAT_S", 0.02)
    start_gateway()
    beat = controller.expect(msg.Heartbeat)
    assert beat.rss_bytes > 10_000_000


def test_a_text_model_says_so(
    start_gateway: Start, controller: ScriptedController, text_checkpoint: os.PathLike[str], pool: DescriptorPool
) -> None:
    client = Client(pool, start_gateway(model_path=str(text_checkpoint)).channel)
    call = client.start("Control", "GetServerInfo")
    controller.send(msg.Gauges(controller.expect(msg.GaugesQuery).query_id, {}, {}, {}))
    info = call.result(20)
    assert (info.accepts_images, info.image_mark) == (False, "")
