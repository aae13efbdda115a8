"""Log-probabilities of the output and of the prompt, from records to events."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import pytest

from airside.controller.gateway.continuation import RECORDS_MAX
from airside.controller.gateway.streams import TOKENS_MAX
from airside.proto.messages import ImageReady
from tests.gateway.client import Client
from tests.gateway.scripted_controller import ScriptedController, batch, finish, prompt_batch, record
from tests.gateway.tiny_checkpoint import END_ID, IMAGE_ID, byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
SPELLER = byte_level_tokenizer(vocab_size=260)
HALVES = [TOKENIZER.token_to_id(token) for token in SPELLER.encode("é").tokens]
A, B = (TOKENIZER.token_to_id(char) for char in "ab")


def deltas(call: Any) -> list[Any]:
    return [event.delta for event in call if event.WhichOneof("event") == "delta"]


def seen(logprobs: Sequence[Any]) -> list[tuple[int, bytes, float]]:
    return [(entry.token_id, entry.text, entry.logprob) for entry in logprobs]


def test_every_token_has_one_with_its_own_bytes(client: Client, controller: ScriptedController) -> None:
    call = client.generate(prompt="a", output={"logprobs": 2})
    request = controller.accept()
    records = [
        record(-1.0, (A, -0.25), (HALVES[0], -1.0)),
        record(-2.0, (HALVES[1], -2.0), (END_ID, -4.0), nextn=-0.5),
        record(-3.0, (END_ID, -3.0), (999_999, -5.0), confidence=0.75),
    ]
    ids = [*HALVES, END_ID]
    controller.send(batch((request.seq_id, ids[:1]), records={request.seq_id: records[0]}, step_tokens=40))
    rest = {request.seq_id: b"".join(records[1:])}
    controller.send(batch((request.seq_id, ids[1:]), records=rest, step_tokens=50, finished=[finish(request.seq_id)]))
    events = deltas(call)
    logprobs = [entry for delta in events for entry in delta.logprobs]
    assert [len(delta.logprobs) for delta in events] == [len(delta.token_ids) for delta in events]
    assert seen(logprobs) == [
        (HALVES[0], b"\xc3", -1.0),
        (HALVES[1], b"\xa9", -2.0),
        (END_ID, b"<|end|>", -3.0),
    ]
    assert [entry.sum_smaller_probs for entry in logprobs] == [-0.125, -0.25, -0.375]
    assert [[*seen(entry.top)] for entry in logprobs] == [
        [(A, b"a", -0.25), (HALVES[0], b"\xc3", -1.0)],
        [(HALVES[1], b"\xa9", -2.0), (END_ID, b"<|end|>", -4.0)],
        [(END_ID, b"<|end|>", -3.0), (999_999, b"", -5.0)],
    ]
    assert [entry.HasField("nextn_logprob") for entry in logprobs] == [False, True, False]
    assert [entry.HasField("draft_confidence") for entry in logprobs] == [False, False, True]
    assert (logprobs[1].nextn_logprob, logprobs[2].draft_confidence) == (-0.5, 0.75)
    assert events[-1].step_tokens == 50


def test_none_behind_a_stop_string(client: Client, controller: ScriptedController) -> None:
    call = client.generate(prompt="a", output={"logprobs": 0}, stop={"strings": ["ab"]})
    request = controller.accept()
    ids = [B, A, B, A]
    records = b"".join(record(-float(i)) for i in range(4))
    controller.send(
        batch((request.seq_id, ids), records={request.seq_id: records}, finished=[finish(request.seq_id, "length")])
    )
    (delta,) = deltas(call)
    assert (list(delta.token_ids), delta.text) == ([B, A, B], "b")
    assert seen(delta.logprobs) == [(B, b"b", 0.0), (A, b"a", -1.0), (B, b"b", -2.0)]


def test_events_stay_below_the_size_that_clients_take(client: Client, controller: ScriptedController) -> None:
    call = client.generate(prompt="a", output={"logprobs": 20})
    request = controller.accept()
    ids = [TOKENIZER.token_to_id("[tool]")] * TOKENS_MAX
    records = record(-123.456, *[(ids[0], -123.456)] * 20) * TOKENS_MAX
    controller.send(batch((request.seq_id, ids), records={request.seq_id: records}, finished=[finish(request.seq_id)]))
    events = deltas(call)
    assert [len(delta.logprobs) for delta in events] == [RECORDS_MAX] * (TOKENS_MAX // RECORDS_MAX)
    assert max(delta.ByteSize() for delta in events) < 2_000_000
    assert [len(delta.token_ids) for delta in events] == [len(delta.logprobs) for delta in events]


def test_the_prompts_first_token_has_none(client: Client, controller: ScriptedController) -> None:
    call = client.generate(token_ids={"ids": [5, 6, 7, 8]}, output={"prompt_logprobs": 1})
    request = controller.accept()
    assert request.prompt_logprobs == 1
    records = [record(-float(i), (40 + i, -0.5)) for i in range(1, 4)]
    controller.send(prompt_batch(request.seq_id, records[0]))
    controller.send(prompt_batch(request.seq_id, b"".join(records[1:])))
    controller.send(prompt_batch(request.seq_id, records[0]))  # one too many
    controller.send(batch((request.seq_id, [A]), finished=[finish(request.seq_id)]))
    events = deltas(call)
    prompt = [entry for delta in events for entry in delta.prompt_logprobs]
    assert [(entry.token_id, entry.logprob, entry.top[0].token_id) for entry in prompt] == [
        (6, -1.0, 41),
        (7, -2.0, 42),
        (8, -3.0, 43),
    ]
    assert list(events[-1].token_ids) == [A]
    assert not any(delta.prompt_logprobs and delta.token_ids for delta in events)


@pytest.mark.parametrize("first", [True, False])
def test_a_picture_has_as_many_as_it_takes_tokens(client: Client, controller: ScriptedController, first: bool) -> None:
    ids = [IMAGE_ID, 5, IMAGE_ID, 6] if first else [5, IMAGE_ID, 6, IMAGE_ID]
    images = [{"data": base64.b64encode(data).decode()} for data in (b"1", b"2")]
    call = client.generate(token_ids={"ids": ids}, images=images, output={"prompt_logprobs": 0})
    request = controller.accept()
    sizes = [3, 2]
    runs = [
        [token] if token != IMAGE_ID else [IMAGE_ID] * sizes[ids[:i].count(IMAGE_ID)] for i, token in enumerate(ids)
    ]
    expanded = [token for run in runs for token in run]
    records = b"".join(record(-float(i)) for i in range(1, len(expanded)))
    controller.send(prompt_batch(request.seq_id, records[: 2 * 16]))  # before any picture's size is known
    controller.send(ImageReady(request.seq_id, 1, sizes[1], 0.5))
    controller.send(ImageReady(request.seq_id, 0, sizes[0], 0.5))
    controller.send(prompt_batch(request.seq_id, records[2 * 16 :]))
    controller.send(batch((request.seq_id, [A]), finished=[finish(request.seq_id)]))
    prompt = [entry for delta in deltas(call) for entry in delta.prompt_logprobs]
    assert [(entry.token_id, entry.logprob) for entry in prompt] == [
        (token, -float(i)) for i, token in enumerate(expanded) if i > 0
    ]
