"""Stop strings, from the text to the controller and to the client."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from airside.proto.messages import AbortSequence, Shutdown, StopSequence
from tests.gateway.client import Client, events_and_failure
from tests.gateway.conftest import RunningGateway
from tests.gateway.scripted_controller import ScriptedController, batch, finish
from tests.gateway.tiny_checkpoint import END_ID, byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
ABC = [TOKENIZER.token_to_id(char) for char in "abc"]
A, B, C = ABC


def joined(events: list[Any]) -> tuple[str, list[int]]:
    """Text and token ids of all deltas."""
    found = [event.delta for event in events if event.WhichOneof("event") == "delta"]
    return "".join(delta.text for delta in found), [i for delta in found for i in delta.token_ids]


@pytest.mark.parametrize(("include_stop", "text"), [(False, "a"), (True, "abc")])
def test_a_stop_string_over_a_token_border(
    client: Client, controller: ScriptedController, include_stop: bool, text: str
) -> None:
    call = client.generate(prompt="a", stop={"strings": ["bc"], "include_stop": include_stop})
    request = controller.accept()
    controller.send(batch((request.seq_id, [A, B])))
    assert next(call).WhichOneof("event") == "accepted"
    first = next(call)
    assert (first.delta.text, list(first.delta.token_ids)) == ("a", [A, B])  # the tokens need not wait
    controller.send(batch((request.seq_id, [C])))
    stop = controller.expect(StopSequence)
    assert (stop.seq_id, stop.num_tokens, stop.detail) == (request.seq_id, 3, "stop string 'bc'")
    controller.send(batch((request.seq_id, [A, A])))  # on their way already
    controller.send(batch((request.seq_id, [B]), finished=[finish(request.seq_id, "stop", "stop string")]))
    *rest, last = list(call)
    assert joined([first, *rest]) == (text, ABC)
    finished = last.finished
    assert (finished.reason, finished.stop_match, finished.detail) == ("stop", "bc", "stop string 'bc'")
    assert finished.usage.completion_tokens == 3
    assert call.code() == grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("reason", "detail"),
    [("length", "max_tokens"), ("abort", "deadline exceeded"), ("insufficient_system_resource", "no block")],
)
def test_the_engines_own_end_comes_after_the_match(
    client: Client, controller: ScriptedController, reason: str, detail: str
) -> None:
    call = client.generate(prompt="a", stop={"strings": ["b"]})
    request = controller.accept()
    controller.send(batch((request.seq_id, ABC), finished=[finish(request.seq_id, reason, detail)]))
    *events, last = list(call)
    assert joined(events) == ("a", [A, B])
    assert (last.finished.reason, last.finished.stop_match) == ("stop", "b")
    assert last.finished.usage.completion_tokens == 2
    assert call.code() == grpc.StatusCode.OK


@pytest.mark.parametrize(("reason", "ok"), [("length", True), ("stop", True), ("abort", False)])
def test_held_text_is_given_out_at_any_other_end(
    client: Client, controller: ScriptedController, reason: str, ok: bool
) -> None:
    call = client.generate(prompt="a", stop={"strings": ["abcd"]})
    request = controller.accept()
    controller.send(batch((request.seq_id, ABC), finished=[finish(request.seq_id, reason)]))
    events, code = (list(call), None) if ok else events_and_failure(call)
    assert joined(events) == ("abc", ABC)
    assert (events[-1].finished.reason, events[-1].finished.stop_match) == (reason, "")
    assert events[-1].finished.usage.completion_tokens == 3
    assert (code is None) == ok


def test_held_text_is_given_out_when_the_controller_is_lost(
    client: Client, gateway: RunningGateway, controller: ScriptedController
) -> None:
    call = client.generate(prompt="a", stop={"strings": ["abcd"]})
    request = controller.accept()
    controller.send(batch((request.seq_id, ABC)))
    assert [next(call).WhichOneof("event") for _ in range(2)] == ["accepted", "delta"]
    controller.send(Shutdown("counted as lost"))
    events, failed = events_and_failure(call)
    assert joined(events) == ("abc", [])
    assert events[-1].finished.reason == "abort"
    assert failed.code == grpc.StatusCode.UNAVAILABLE
    gateway.wait_until_stopped()


def test_a_match_counts_from_min_tokens_on(client: Client, controller: ScriptedController) -> None:
    call = client.generate(prompt="a", stop={"strings": ["b"], "min_tokens": 3})
    request = controller.accept()
    controller.send(batch((request.seq_id, [B, B, A])))
    controller.send(batch((request.seq_id, [B])))
    assert controller.expect(StopSequence).num_tokens == 4
    controller.send(batch(finished=[finish(request.seq_id)]))
    assert joined(list(call)) == ("bba", [B, B, A, B])


@pytest.mark.parametrize(("include_stop", "text"), [(False, "ab"), (True, "abc")])
def test_a_stop_token_has_its_id_and_perhaps_its_text(
    client: Client, controller: ScriptedController, include_stop: bool, text: str
) -> None:
    call = client.generate(prompt="a", stop={"token_ids": [C], "include_stop": include_stop})
    request = controller.accept()
    assert request.stop_token_ids == [END_ID, C]
    controller.send(batch((request.seq_id, ABC), finished=[finish(request.seq_id)]))
    assert joined(list(call)) == (text, ABC)


def test_a_client_that_leaves_after_the_match(client: Client, controller: ScriptedController) -> None:
    call = client.generate(prompt="a", stop={"strings": ["b"]})
    request = controller.accept()
    controller.send(batch((request.seq_id, ABC)))
    assert controller.expect(StopSequence).num_tokens == 2
    call.cancel()
    assert controller.expect(AbortSequence).seq_id == request.seq_id
