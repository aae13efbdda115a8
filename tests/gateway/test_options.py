"""Options that are valid: what the controller is told of them."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from airside.proto.image_content import content_hash
from airside.proto.messages import AddRequest
from tests.gateway.bad_options import VOCAB_SIZE, with_drafts, with_output, with_sampling, with_stop
from tests.gateway.client import Client
from tests.gateway.scripted_controller import ScriptedController, batch, finish
from tests.gateway.tiny_checkpoint import END_ID, IMAGE_ID, byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()


def told(client: Client, controller: ScriptedController, **fields: Any) -> AddRequest:
    """What a request becomes."""
    call = client.generate(**fields)
    request = controller.accept()
    controller.send(batch(finished=[finish(request.seq_id)]))
    assert [event.WhichOneof("event") for event in call] == ["accepted", "finished"]
    return request


def test_what_is_left_out_is_off(client: Client, controller: ScriptedController) -> None:
    request = told(client, controller, prompt="a")
    assert (request.user, request.cache_salt, request.image_hashes) == ("", "", [])
    assert (request.repetition_penalty, request.presence_penalty, request.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (request.logit_bias, request.allowed_token_ids) == ({}, [])
    assert (request.logprobs, request.prompt_logprobs, request.grammar) == (-1, -1, "")
    assert (request.drafts_max, request.golden_tokens, request.golden_mode, request.golden_acceptance) == (
        None,
        b"",
        "",
        1.0,
    )


def test_all_options_arrive(client: Client, controller: ScriptedController) -> None:
    request = told(
        client,
        controller,
        prompt="a",
        user="東京 user",
        cache_salt="salt",
        sampling={
            "repetition_penalty": 1.25,
            "presence_penalty": -2,
            "frequency_penalty": 2,
            "logit_bias": {5: -100, 6: 100, 7: 0.5},
            "allowed_token_ids": [9, 8, 9],
        },
        output={"logprobs": 0, "prompt_logprobs": 20},
        drafts={"max_tokens": 0, "golden": {"ids": [5, 6]}, "golden_acceptance": 0.5},
    )
    assert (request.user, request.cache_salt) == ("東京 user", "salt")
    assert (request.repetition_penalty, request.presence_penalty, request.frequency_penalty) == (1.25, -2.0, 2.0)
    assert request.logit_bias == {5: -100.0, 6: 100.0, 7: 0.5}
    assert request.allowed_token_ids == [END_ID, 8, 9]  # the end token too
    assert (request.logprobs, request.prompt_logprobs) == (0, 20)
    assert (request.drafts_max, request.golden_mode, request.golden_acceptance) == (0, "draft", 0.5)
    assert np.frombuffer(request.golden_tokens, "<i4").tolist() == [5, 6]


ACCEPTED: list[tuple[dict[str, Any], dict[str, object]]] = [
    # what looks odd and has a meaning: request, what the controller is told
    (with_sampling(temperature=1e-9), {"temperature": pytest.approx(1e-9)}),
    (with_sampling(top_k=VOCAB_SIZE + 1), {"top_k": 0}),
    (with_sampling(top_k=2**31 - 1), {"top_k": 0}),
    (with_sampling(repetition_penalty=10), {"repetition_penalty": 10.0}),
    (with_sampling(allowed_token_ids=[5]) | {"stop": {"ignore_eos": True}}, {"allowed_token_ids": [5]}),
    (with_stop(max_tokens=2**31 - 1), {"max_tokens": 2**31 - 1}),
    (with_stop(ignore_eos=True), {"stop_token_ids": []}),
    (with_stop(ignore_eos=True) | {"structure": {"json_object": True}}, {"stop_token_ids": [END_ID]}),
    (with_drafts(golden={"ids": [5] * 98}, force_golden=True), {"golden_mode": "force"}),
    (with_output(logprobs=20), {"logprobs": 20}),
    (with_output(), {"logprobs": -1}),
    ({"prompt": "a", "structure": {}, "drafts": {}}, {"grammar": "", "drafts_max": None}),
    ({"prompt": "a", "user": "x" * 256, "cache_salt": "y" * 256}, {"user": "x" * 256, "cache_salt": "y" * 256}),
]


@pytest.mark.parametrize(("fields", "expected"), ACCEPTED)
def test_odd_values_with_a_meaning(
    client: Client, controller: ScriptedController, fields: dict[str, Any], expected: dict[str, object]
) -> None:
    request = told(client, controller, **fields)
    assert {name: getattr(request, name) for name in expected} == expected


@pytest.mark.parametrize("prompt", [" ", "\n\n\t", "<|begin|><|end|>", "\u0000", "a\u0000b", "\ufeff", "x"])
def test_odd_prompts_are_prompts(client: Client, controller: ScriptedController, prompt: str) -> None:
    request = told(client, controller, prompt=prompt)
    assert np.frombuffer(request.token_ids, "<i4").tolist() == TOKENIZER.encode(prompt).ids


def test_a_picture_without_any_text(client: Client, controller: ScriptedController) -> None:
    image = {"data": base64.b64encode(b"file").decode()}
    request = told(client, controller, prompt="<image>", images=[image])
    assert np.frombuffer(request.token_ids, "<i4").tolist() == [IMAGE_ID]
    chat = client.chat(messages=[{"role": "user", "parts": [{"image": image}]}])
    assert len(controller.accept().image_positions) == 1
    chat.cancel()


def test_pictures_are_known_by_their_content(client: Client, controller: ScriptedController) -> None:
    files = [b"one", b"two", b"one"]
    images = [{"data": base64.b64encode(data).decode()} for data in files]
    request = told(client, controller, prompt="<image>" * 3, images=images)
    assert request.image_hashes == [content_hash(data) for data in files]
    assert {len(digest) for digest in request.image_hashes} == {16}


def test_a_grammar_arrives_and_a_bad_one_does_not(client: Client, controller: ScriptedController) -> None:
    grammars = [
        told(client, controller, prompt="a", structure=structure).grammar
        for structure in ({"regex": "a+"}, {"choice": {"texts": ["yes", "no"]}}, {"regex": "a+"})
    ]
    assert all(grammars)
    assert grammars[0] == grammars[2] != grammars[1]
