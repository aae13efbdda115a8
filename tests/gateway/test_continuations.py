"""Several continuations of one prompt, under one call."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from airside.controller.gateway.terms import TermsReader
from airside.controller.gateway.text_model import TextModel
from airside.proto import airside_pb2 as pb
from airside.proto.messages import AbortSequence, Accepted, AddRequest, ImageReady, Rejected, Shutdown
from airside.proto.settings import GatewaySettings
from tests.gateway.client import Client, events_and_failure, failure
from tests.gateway.conftest import RunningGateway
from tests.gateway.scripted_controller import ScriptedController, batch, finish, prompt_batch, record
from tests.gateway.tiny_checkpoint import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
A, B, C = (TOKENIZER.token_to_id(char) for char in "abc")


def requests_of(controller: ScriptedController, n: int) -> list[AddRequest]:
    return [controller.expect(AddRequest) for _ in range(n)]


def texts(events: list[Any], n: int) -> list[str]:
    found = [event.delta for event in events if event.WhichOneof("event") == "delta"]
    return ["".join(delta.text for delta in found if delta.index == index) for index in range(n)]


def kinds(events: list[Any]) -> list[str]:
    return [event.WhichOneof("event") for event in events]


def test_each_has_its_index_seed_and_end(client: Client, controller: ScriptedController) -> None:
    call = client.generate(prompt="a", n=3, sampling={"seed": 7}, request_id="mine")
    requests = requests_of(controller, 3)
    assert {request.request_id for request in requests} == {"mine"}
    assert len({request.arrival for request in requests}) == 1
    assert len({request.seq_id for request in requests}) == 3
    for place, request in enumerate(requests):
        controller.send(Accepted(request.seq_id, queue_position=place + 2))
    controller.send(batch(*[(request.seq_id, [token]) for request, token in zip(requests, (A, B, C), strict=True)]))
    controller.send(batch((requests[2].seq_id, [A]), finished=[finish(requests[1].seq_id, "length", "1 token")]))
    controller.send(batch((requests[0].seq_id, [A]), finished=[finish(requests[i].seq_id) for i in (2, 0)]))
    events = list(call)
    accepted = events[0].accepted
    assert (accepted.request_id, accepted.seed, accepted.queue_position) == ("mine", 7, 2)
    assert list(accepted.seeds) == [request.seed for request in requests]
    assert accepted.seeds[0] == 7
    assert len(set(accepted.seeds)) == 3
    assert texts(events, 3) == ["aa", "b", "ca"]
    ends = [event.finished for event in events if event.WhichOneof("event") == "finished"]
    assert sorted((end.index, end.reason) for end in ends) == [(0, "stop"), (1, "length"), (2, "stop")]
    assert kinds(events).count("accepted") == 1
    assert call.code() == grpc.StatusCode.OK


def test_one_alone_names_no_seeds(client: Client, controller: ScriptedController) -> None:
    call = client.generate(prompt="a", n=1, sampling={"seed": 7})
    request = controller.accept()
    controller.send(batch(finished=[finish(request.seq_id)]))
    accepted, _ = call
    assert list(accepted.accepted.seeds) == []


def test_acceptance_waits_for_all(client: Client, controller: ScriptedController) -> None:
    call = client.generate(prompt="a", n=2)
    first, second = requests_of(controller, 2)
    controller.send(Accepted(first.seq_id, 0))
    controller.send(batch((first.seq_id, [A]), finished=[finish(first.seq_id)]))
    controller.send(Accepted(second.seq_id, 1))
    controller.send(batch(finished=[finish(second.seq_id)]))
    assert kinds(list(call)) == ["accepted", "delta", "finished", "finished"]


@pytest.mark.parametrize("rejected_one", [0, 1, 2])
def test_one_rejected_ends_all(client: Client, controller: ScriptedController, rejected_one: int) -> None:
    call = client.generate(prompt="a", n=3)
    requests = requests_of(controller, 3)
    for index, request in enumerate(requests):
        is_rejected = index == rejected_one
        controller.send(
            Rejected(request.seq_id, "queue_full", "too many") if is_rejected else Accepted(request.seq_id, 0)
        )
    failed = failure(call)
    assert (failed.code, failed.retry_after_s is not None) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
    aborted = {controller.expect(AbortSequence).seq_id for _ in range(2)}
    assert aborted == {request.seq_id for request in requests} - {requests[rejected_one].seq_id}


def test_the_status_is_that_of_the_first_bad_end(client: Client, controller: ScriptedController) -> None:
    call = client.generate(prompt="a", n=4)
    requests = [controller.accept() for _ in range(4)]
    ends = [("stop", ""), ("insufficient_system_resource", "no block"), ("abort", "by id"), ("length", "")]
    for request, (reason, detail) in zip(requests, ends, strict=True):
        controller.send(batch((request.seq_id, [A]), finished=[finish(request.seq_id, reason, detail)]))
    events, failed = events_and_failure(call)
    assert [event.finished.reason for event in events if event.WhichOneof("event") == "finished"] == [
        reason for reason, _ in ends
    ]
    assert (failed.code, failed.message) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "no block")


def test_a_cancel_aborts_those_that_have_not_ended(client: Client, controller: ScriptedController) -> None:
    call = client.generate(prompt="a", n=3)
    requests = [controller.accept() for _ in range(3)]
    controller.send(batch(finished=[finish(requests[1].seq_id)]))
    assert kinds([next(call), next(call)]) == ["accepted", "finished"]
    call.cancel()
    aborted = [controller.expect(AbortSequence).seq_id for _ in range(2)]
    assert aborted == [requests[0].seq_id, requests[2].seq_id]


def test_a_lost_controller_ends_those_that_have_not(
    client: Client, gateway: RunningGateway, controller: ScriptedController
) -> None:
    call = client.generate(prompt="a", n=2)
    requests = [controller.accept() for _ in range(2)]
    controller.send(batch(finished=[finish(requests[0].seq_id)]))
    assert kinds([next(call), next(call)]) == ["accepted", "finished"]
    controller.send(Shutdown("counted as lost"))
    events, failed = events_and_failure(call)
    assert [(event.finished.index, event.finished.reason) for event in events] == [(1, "abort")]
    assert failed.code == grpc.StatusCode.UNAVAILABLE
    gateway.wait_until_stopped()


def test_what_is_the_same_for_all_is_told_once(client: Client, controller: ScriptedController) -> None:
    call = client.generate(
        prompt="a<image>", images=[{"data": "eA=="}], n=2, output={"prompt_logprobs": 0}, stop={"strings": ["zz"]}
    )
    requests = [controller.accept() for _ in range(2)]
    assert [request.prompt_logprobs for request in requests] == [0, -1]
    for request in requests:
        controller.send(ImageReady(request.seq_id, 0, 2, 0.5))
    controller.send(prompt_batch(requests[0].seq_id, record(-1.0) + record(-2.0)))
    controller.send(batch(finished=[finish(request.seq_id) for request in requests]))
    events = list(call)
    assert kinds(events) == ["accepted", "image_ready", "delta", "finished", "finished"]
    assert [entry.logprob for entry in events[2].delta.prompt_logprobs] == [-1.0, -2.0]


def test_stop_strings_are_each_ones_own(client: Client, controller: ScriptedController) -> None:
    call = client.generate(prompt="a", n=2, stop={"strings": ["b"]})
    requests = [controller.accept() for _ in range(2)]
    rows = [(requests[0].seq_id, [A, B, C]), (requests[1].seq_id, [C, A])]
    controller.send(batch(*rows, finished=[finish(request.seq_id, "length") for request in requests]))
    events = list(call)
    assert texts(events, 2) == ["a", "ca"]
    ends = {event.finished.index: event.finished for event in events if event.WhichOneof("event") == "finished"}
    assert [(ends[i].reason, ends[i].stop_match) for i in range(2)] == [("stop", "b"), ("length", "")]


def test_seeds_are_a_function_of_seed_and_index(settings: GatewaySettings) -> None:
    reader = TermsReader(settings, TextModel.load(settings.model_path))
    seeds = {
        (seed, index): reader.read(pb.GenerateRequest(sampling=pb.Sampling(seed=seed), n=16), 100, 0.0).seed(index)
        for seed in (0, 1, 2**63, 2**64 - 1)
        for index in range(16)
    }
    assert len(set(seeds.values())) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds.values())
    assert seeds[0, 0] == 0
    assert seeds[0, 1] == 0xE220A8397B1DCDAF  # SplitMix64's first output from state 0
