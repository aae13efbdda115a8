"""Tokens of a prompt without a run of the model, and the text of tokens."""

from __future__ import annotations

from collections.abc import Collection

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool

from airside.controller.gateway import inference
from airside.controller.gateway.detokenizer import Detokenizer
from airside.controller.gateway.text_model import TextModel
from airside.proto.messages import CountImages, ImagesCounted
from tests.gateway.client import Client, failure
from tests.gateway.conftest import Start
from tests.gateway.scripted_controller import ScriptedController
from tests.gateway.test_generate import image
from tests.gateway.tiny_checkpoint import END_ID, IMAGE_ID, byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
WORDS = "the quick fox"


def test_a_text_is_counted_here(client: Client) -> None:
    reply = client.start("Inference", "CountTokens", prompt=WORDS).result(20)
    assert reply.prompt_tokens == len(TOKENIZER.encode(WORDS).ids)
    assert (reply.image_tokens, list(reply.tokens_of_images)) == (0, [])


def test_a_prompt_longer_than_the_context_is_counted_too(client: Client) -> None:
    words = WORDS * 1000
    reply = client.start("Inference", "CountTokens", prompt=words).result(20)
    assert reply.prompt_tokens == len(TOKENIZER.encode(words).ids)


@pytest.mark.parametrize("kind", ["prompt", "token_ids", "messages"])
def test_images_take_the_place_of_their_marks(client: Client, controller: ScriptedController, kind: str) -> None:
    files = [b"first", b"second"]
    text = "a<image>b<image>"
    asked: dict[str, object] = {"images": [image(file) for file in files]}
    if kind == "prompt":
        asked["prompt"] = text
    elif kind == "token_ids":
        asked["token_ids"] = {"ids": TOKENIZER.encode(text).ids}
    else:
        parts = [{"text": "a"}, {"image": image(files[0])}, {"text": "b"}, {"image": image(files[1])}]
        asked = {"messages": [{"role": "user", "parts": parts}]}
        text = f"<|begin|>user\n{text}<|end|><|begin|>assistant\n"
    call = client.start("Inference", "CountTokens", **asked)
    query = controller.expect(CountImages)
    assert controller.attachments == files
    controller.send(ImagesCounted(query.query_id, [17, 4]))
    reply = call.result(20)
    assert reply.prompt_tokens == len(TOKENIZER.encode(text).ids) - 2 + 21
    assert (reply.image_tokens, list(reply.tokens_of_images)) == (21, [17, 4])


@pytest.mark.parametrize(
    ("refused", "cause", "code", "fields", "retry"),
    [
        ("image", "truncated", grpc.StatusCode.INVALID_ARGUMENT, ["images"], False),
        ("image", "worker_lost", grpc.StatusCode.INTERNAL, [], False),
        ("queue_full", "", grpc.StatusCode.RESOURCE_EXHAUSTED, [], True),
        ("unavailable", "", grpc.StatusCode.UNAVAILABLE, [], True),
    ],
)
def test_images_that_cannot_be_counted(
    client: Client,
    controller: ScriptedController,
    refused: str,
    cause: str,
    code: grpc.StatusCode,
    fields: list[str],
    retry: bool,
) -> None:
    call = client.start("Inference", "CountTokens", prompt="<image>", images=[image(b"file")])
    query = controller.expect(CountImages)
    controller.send(ImagesCounted(query.query_id, [], refused, "why", cause))
    failed = failure(call)
    assert (failed.code, failed.message, failed.fields, failed.retry_after_s is not None) == (
        code,
        "why",
        fields,
        retry,
    )


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "a<image>"}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "parts": [{"text": "a"}]}]}, "messages"),
        ({"images": [image(b"a")], "messages": [{"role": "user", "parts": [{"text": "a"}]}]}, "messages"),
    ],
)
def test_what_cannot_be_counted(client: Client, asked: dict[str, object], field: str) -> None:
    failed = failure(client.start("Inference", "CountTokens", **asked))
    assert (failed.code, failed.fields) == (grpc.StatusCode.INVALID_ARGUMENT, [field])


def test_nothing_is_fetched_to_be_counted(start_gateway: Start, pool: DescriptorPool) -> None:
    client = Client(pool, start_gateway(allow_urls=True).channel)
    asked = {"prompt": "<image><image>", "images": [image(b"a"), {"url": "http://example.org/a.png"}]}
    failed = failure(client.start("Inference", "CountTokens", **asked))
    assert (failed.code, failed.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["images"])
    assert "image 1 has a URL" in failed.message


def test_detokenize(client: Client) -> None:
    words = "naïve 東京 fox"
    ids = [*TOKENIZER.encode(words).ids, IMAGE_ID, END_ID]
    assert client.start("Inference", "Detokenize", token_ids=ids).result(20).text == words
    assert client.start("Inference", "Detokenize", token_ids=[]).result(20).text == ""
    speller = byte_level_tokenizer(vocab_size=260)
    half = [TOKENIZER.token_to_id(token) for token in speller.encode("é").tokens[:1]]
    assert client.start("Inference", "Detokenize", token_ids=half).result(20).text == "\ufffd"
    failed = failure(client.start("Inference", "Detokenize", token_ids=[1, 10**6]))
    assert (failed.code, failed.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["token_ids[1]"])


def test_many_tokens_become_text_in_pieces_between_which_others_have_their_turn(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "naïve 東京 fox" * 3
    ids = TOKENIZER.encode(words).ids
    pieces: list[int] = []

    class Counted:
        def __init__(self, detokenizer: Detokenizer) -> None:
            self._detokenizer = detokenizer
            self.flush = detokenizer.flush

        def push(self, token_ids: Collection[int]) -> str:
            pieces.append(len(token_ids))
            return self._detokenizer.push(token_ids)

    make = TextModel.detokenizer
    monkeypatch.setattr(TextModel, "detokenizer", lambda model: Counted(make(model)))
    monkeypatch.setattr(inference, "_PIECE_TOKENS", 2)
    assert client.start("Inference", "Detokenize", token_ids=ids).result(20).text == words
    assert (sum(pieces), max(pieces)) == (len(ids), 2)
