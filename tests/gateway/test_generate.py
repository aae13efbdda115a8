from __future__ import annotations

import base64
import time

import grpc
import numpy as np
import pytest

from airside.proto.messages import AddRequest, ImageReady, Rejected
from tests.gateway.client import Client, events_and_failure, failure
from tests.gateway.scripted_controller import ScriptedController, batch, finish
from tests.gateway.tiny_checkpoint import END_ID, IMAGE_ID, byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
_PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION


def ids_of(request: AddRequest) -> list[int]:
    ids: list[int] = np.frombuffer(request.token_ids, "<i4").tolist()
    return ids


def image(data: bytes) -> dict[str, str]:
    return {"data": base64.b64encode(data).decode()}


def test_a_whole_stream(client: Client, controller: ScriptedController) -> None:
    before = time.time()
    call = client.generate(prompt="the quick fox", sampling={"temperature": 0.5, "seed": 7}, request_id="mine")
    request = controller.accept()
    assert (request.request_id, request.temperature, request.seed) == ("mine", 0.5, 7)
    assert before <= request.arrival <= time.time()
    assert ids_of(request) == TOKENIZER.encode("the quick fox").ids
    words = TOKENIZER.encode(" jumps 🙂").ids
    controller.send(batch((request.seq_id, words[:1]), step_tokens=33))
    accepted, first = next(call), next(call)
    ends = [finish(request.seq_id, "stop", "end token")]
    controller.send(batch((request.seq_id, [*words[1:], END_ID]), finished=ends, step_tokens=34))
    *rest, finished = list(call)
    deltas = [first, *rest]
    assert accepted.accepted.request_id == "mine"
    assert accepted.accepted.seed == 7
    assert accepted.accepted.queue_position == 3
    assert accepted.accepted.prompt_tokens == len(ids_of(request))
    assert "".join(event.delta.text for event in deltas) == " jumps 🙂"
    assert [i for event in deltas for i in event.delta.token_ids] == [*words, END_ID]
    assert (finished.finished.reason, finished.finished.detail) == ("stop", "end token")
    usage, timings = finished.finished.usage, finished.finished.timings
    assert (usage.prompt_tokens, usage.image_tokens, usage.completion_tokens) == (11, 7, 3)
    assert (usage.cached_tokens, usage.draft_tokens, usage.accepted_tokens) == (5, 9, 4)
    assert (timings.queued_s, timings.time_to_first_token_s, timings.decode_s) == (0.25, 0.5, 0.75)
    assert (timings.preemptions, timings.vision_wait_s, timings.prefill_s) == (1, 0.125, 0.375)
    assert timings.preempted_s == 0.625
    assert (finished.finished.index, finished.finished.stop_match) == (0, "")
    assert [event.delta.step_tokens for event in deltas] == [33, 34]
    assert call.code() == grpc.StatusCode.OK


def test_what_is_left_out_is_filled_in(client: Client, controller: ScriptedController) -> None:
    calls = [client.generate(prompt="a"), client.generate(prompt="a")]
    requests = [controller.accept() for _ in calls]
    assert [r.temperature for r in requests] == [0.0, 0.0]  # this checkpoint's do_sample is false
    assert [(r.top_k, r.top_p, r.min_p, r.max_tokens, r.min_tokens, r.priority) for r in requests] == [
        (0, 1.0, 0.0, None, 0, 0)
    ] * 2
    assert requests[0].stop_token_ids == [END_ID]
    assert requests[0].deadline is None
    assert requests[0].seed != requests[1].seed
    assert all(0 <= r.seed < 1 << 63 for r in requests)
    accepted = {next(call).accepted.request_id for call in calls}
    assert accepted == {r.request_id for r in requests}
    assert len(accepted) == 2
    assert all(accepted)
    for call in calls:
        call.cancel()


def test_stop_and_sampling_values_arrive(client: Client, controller: ScriptedController) -> None:
    sampling = {"temperature": 100, "top_k": 5, "top_p": 0.5, "min_p": 1, "seed": 2**64 - 1}
    stop = {"max_tokens": 9, "min_tokens": 9, "ignore_eos": True, "token_ids": [5, 4, 5]}
    call = client.generate(prompt="a", sampling=sampling, stop=stop, priority=-3)
    request = controller.accept()
    assert (request.top_k, request.top_p, request.min_p, request.seed) == (5, 0.5, 1.0, 2**64 - 1)
    assert (request.max_tokens, request.min_tokens, request.stop_token_ids, request.priority) == (9, 9, [4, 5], -3)
    call.cancel()


def test_images_travel_beside_the_request(client: Client, controller: ScriptedController) -> None:
    prompt = "a <image> b <image> c"
    call = client.generate(prompt=prompt, images=[image(b"first"), image(b"second")])
    request = controller.accept()
    assert controller.attachments == [b"first", b"second"]
    ids = ids_of(request)
    assert request.image_positions == [i for i, token in enumerate(ids) if token == IMAGE_ID]
    assert len(request.image_positions) == 2
    controller.send(ImageReady(request.seq_id, 1, 17, 0.5))
    controller.send(batch(finished=[finish(request.seq_id, "length")]))
    _, ready, finished = list(call)
    assert (ready.image_ready.index, ready.image_ready.tokens, ready.image_ready.process_s) == (1, 17, 0.5)
    assert finished.finished.reason == "length"
    assert call.code() == grpc.StatusCode.OK


def test_token_ids_may_have_image_marks(client: Client, controller: ScriptedController) -> None:
    call = client.generate(token_ids={"ids": [10, IMAGE_ID, 11]}, images=[image(b"x")])
    request = controller.accept()
    assert ids_of(request) == [10, IMAGE_ID, 11]
    assert request.image_positions == [1]
    call.cancel()


@pytest.mark.parametrize("request_id", ["東京 🙂 é", "x" * 256, "東" * 85 + "x", "a/b c\"'%"])
def test_any_printable_id_is_echoed(client: Client, controller: ScriptedController, request_id: str) -> None:
    call = client.generate(prompt="a", request_id=request_id)
    request = controller.expect(AddRequest)
    assert request.request_id == request_id
    controller.send(Rejected(request.seq_id, "duplicate_id", f"request {request_id!r} is running"))
    failed = failure(call)
    assert (failed.code, failed.fields) == (grpc.StatusCode.ALREADY_EXISTS, ["request_id"])
    assert failed.message == f"request {request_id!r} is running"


def test_a_long_detail_fits_the_trailers(client: Client, controller: ScriptedController) -> None:
    call = client.generate(prompt="a")
    request = controller.expect(AddRequest)
    controller.send(Rejected(request.seq_id, "duplicate_id", "é" * 50_000))
    failed = failure(call)
    assert failed.code == grpc.StatusCode.ALREADY_EXISTS
    assert failed.message.startswith("ééé")


def test_one_batch_serves_many_streams(client: Client, controller: ScriptedController) -> None:
    calls = {f"r{i}": client.generate(prompt="a", request_id=f"r{i}") for i in range(20)}
    requests = [controller.accept() for _ in calls]
    assert len({request.seq_id for request in requests}) == 20
    rows = [(request.seq_id, [20 + int(request.request_id[1:])] * (1 + i % 3)) for i, request in enumerate(requests)]
    controller.send(batch(*rows, (12345, [1, 2, 3])))  # the last one is nobody's
    controller.send(batch(finished=[finish(request.seq_id) for request in requests]))
    for i, request in enumerate(requests):
        events = list(calls[request.request_id])
        assert [t for event in events for t in event.delta.token_ids] == rows[i][1]


def test_an_unfinished_character_is_flushed_before_the_end(client: Client, controller: ScriptedController) -> None:
    speller = byte_level_tokenizer(vocab_size=260)
    ids = [TOKENIZER.token_to_id(token) for token in speller.encode("é").tokens[:1]]
    call = client.generate(prompt="a")
    request = controller.accept()
    controller.send(batch((request.seq_id, ids), finished=[finish(request.seq_id, "length")]))
    texts = [event.delta.text for event in call if event.WhichOneof("event") == "delta"]
    assert texts == ["", "\ufffd"]


@pytest.mark.parametrize(
    ("reason", "detail", "code", "fields", "retry"),
    [
        ("abort", "aborted by request id", grpc.StatusCode.CANCELLED, [], False),
        ("abort", "server is shutting down", grpc.StatusCode.UNAVAILABLE, [], True),
        ("abort", "the model failed: its logits gave no token a probability", grpc.StatusCode.INTERNAL, [], False),
        ("abort", "deadline", grpc.StatusCode.DEADLINE_EXCEEDED, [], False),
        ("prompt_length_exceeded", "200 > 100", grpc.StatusCode.INVALID_ARGUMENT, ["prompt"], False),
        ("insufficient_system_resource", "no block", grpc.StatusCode.RESOURCE_EXHAUSTED, [], True),
        ("abort", "the client stopped reading: its deadline was far", grpc.StatusCode.CANCELLED, [], False),
        ("vision_failed/truncated", "image 0: it is cut off", grpc.StatusCode.INVALID_ARGUMENT, ["images"], False),
        (
            "vision_failed/damaged",
            "image 0: damaged: internal: no",
            grpc.StatusCode.INVALID_ARGUMENT,
            ["images"],
            False,
        ),
        ("vision_failed/internal", "image 0: internal: it failed on it", grpc.StatusCode.INTERNAL, [], False),
        ("vision_failed/worker_lost", "image 0: three died on it", grpc.StatusCode.INTERNAL, [], False),
        ("vision_failed/arena_full", "image 0: there is no room", grpc.StatusCode.RESOURCE_EXHAUSTED, [], True),
        ("vision_failed/memory_full", "image 2: no", grpc.StatusCode.RESOURCE_EXHAUSTED, [], True),
        ("vision_failed/not_allowed", "image 2: no", grpc.StatusCode.PERMISSION_DENIED, ["images"], False),
        ("vision_failed/fetch_timeout", "image 2: no", grpc.StatusCode.INVALID_ARGUMENT, ["images"], False),
        ("structured_output_failed", "no token continues the grammar", _PRECONDITION, ["structure"], False),
        (
            "structured_output_failed",
            "the grammar cannot go on: Parser Error: Current row has 2004 items; max is 2000",
            _PRECONDITION,
            ["structure"],
            False,
        ),
        ("structured_output_failed", "the grammar cannot be built: why", grpc.StatusCode.INTERNAL, [], False),
        ("something_new", "why", grpc.StatusCode.INTERNAL, [], False),
    ],
)
def test_ends_have_a_finished_event_and_then_a_status(
    client: Client,
    controller: ScriptedController,
    reason: str,
    detail: str,
    code: grpc.StatusCode,
    fields: list[str],
    retry: bool,
) -> None:
    call = client.generate(prompt="a")
    request = controller.accept()
    controller.send(batch((request.seq_id, [40]), finished=[finish(request.seq_id, reason, detail)]))
    events, failed = events_and_failure(call)
    assert [event.WhichOneof("event") for event in events] == ["accepted", "delta", "finished"]
    assert events[-1].finished.reason == reason.partition("/")[0]
    assert events[-1].finished.detail.startswith(detail)  # a remedy may follow
    assert failed.code == code
    assert detail in failed.message
    assert failed.fields == fields
    assert (failed.retry_after_s is not None) == retry


@pytest.mark.parametrize(
    ("code", "status", "retry"),
    [
        ("duplicate_id", grpc.StatusCode.ALREADY_EXISTS, False),
        ("context_exceeded", grpc.StatusCode.INVALID_ARGUMENT, False),
        ("pool_exceeded", grpc.StatusCode.RESOURCE_EXHAUSTED, False),
        ("queue_full", grpc.StatusCode.RESOURCE_EXHAUSTED, True),
        ("unavailable", grpc.StatusCode.UNAVAILABLE, True),
        ("invalid", grpc.StatusCode.INVALID_ARGUMENT, False),
    ],
)
def test_rejections(
    client: Client, controller: ScriptedController, code: str, status: grpc.StatusCode, retry: bool
) -> None:
    call = client.generate(prompt="a")
    request = controller.expect(AddRequest)
    controller.send(Rejected(request.seq_id, code, "why it was"))
    failed = failure(call)
    assert (failed.code, failed.message, failed.retry_after_s is not None) == (status, "why it was", retry)
