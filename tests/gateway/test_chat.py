from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.protobuf.descriptor_pool import DescriptorPool

from tests.gateway.client import Client, failure
from tests.gateway.conftest import Start
from tests.gateway.scripted_controller import ScriptedController
from tests.gateway.tiny_checkpoint import IMAGE_ID, byte_level_tokenizer, write_checkpoint

TOKENIZER = byte_level_tokenizer()


def text(words: str) -> dict[str, Any]:
    return {"text": words}


def image(data: bytes) -> dict[str, Any]:
    return {"image": {"data": base64.b64encode(data).decode()}}


def prompt_of(controller: ScriptedController) -> tuple[str, list[int]]:
    request = controller.accept()
    ids = np.frombuffer(request.token_ids, "<i4").tolist()
    return TOKENIZER.decode(ids, skip_special_tokens=False), request.image_positions


def test_messages_go_through_the_template(client: Client, controller: ScriptedController) -> None:
    messages = [
        {"role": "system", "parts": [text("be brief")]},
        {"role": "user", "parts": [text("see "), image(b"1"), text(" and "), image(b"2"), text(" 東京?")]},
        {"role": "assistant", "parts": [text("yes")]},
        {"role": "user", "parts": [text("why")]},
    ]
    call = client.chat(messages=messages)
    prompt, positions = prompt_of(controller)
    assert prompt == (
        "<|begin|>system\nbe brief<|end|><|begin|>user\nsee <image> and <image> 東京?<|end|>"
        "<|begin|>assistant\nyes<|end|><|begin|>user\nwhy<|end|><|begin|>assistant\n"
    )
    assert controller.attachments == [b"1", b"2"]
    assert len(positions) == 2
    call.cancel()


def test_image_positions_are_those_of_the_marks(client: Client, controller: ScriptedController) -> None:
    call = client.chat(messages=[{"role": "user", "parts": [image(b"1")]}])
    request = controller.accept()
    ids = np.frombuffer(request.token_ids, "<i4").tolist()
    assert [ids[i] for i in request.image_positions] == [IMAGE_ID]
    assert ids.count(IMAGE_ID) == 1
    call.cancel()


def test_a_text_models_template_gets_texts(
    start_gateway: Start, controller: ScriptedController, text_checkpoint: Path, pool: DescriptorPool
) -> None:
    client = Client(pool, start_gateway(model_path=str(text_checkpoint)).channel)
    call = client.chat(messages=[{"role": "user", "parts": [text("one "), text("two <"), text("image>")]}])
    prompt, positions = prompt_of(controller)
    assert prompt == "<|begin|>user\none two <image><|end|><|begin|>assistant\n"
    assert positions == []
    call.cancel()


def test_a_mark_put_together_from_parts_is_refused(client: Client) -> None:
    failed = failure(client.chat(messages=[{"role": "user", "parts": [text("<im"), text("age>")]}]))
    assert (failed.code, failed.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["messages"])
    assert "has 1 image marks and the request has 0 images" in failed.message


def test_a_checkpoint_without_a_template(start_gateway: Start, pool: DescriptorPool, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "bare")
    (folder / "chat_template.jinja").unlink()
    client = Client(pool, start_gateway(model_path=str(folder)).channel)
    failed = failure(client.chat(messages=[{"role": "user", "parts": [text("a")]}]))
    assert (failed.code, failed.fields) == (grpc.StatusCode.FAILED_PRECONDITION, ["messages"])
    assert "use Generate" in failed.message


def test_tokenize(client: Client) -> None:
    words = "naïve 東京 <image> fox"
    reply = client.start("Inference", "Tokenize", text=words).result(20)
    expected = TOKENIZER.encode(words)
    assert list(reply.token_ids) == expected.ids
    assert list(reply.tokens) == expected.tokens
    assert list(reply.token_ids).count(IMAGE_ID) == 1
    assert list(client.start("Inference", "Tokenize", text="").result(20).token_ids) == []


def test_a_long_text_is_tokenized_in_a_thread_to_the_same_ids(client: Client) -> None:
    words = "the lazy dog 東京 " * 2000
    reply = client.start("Inference", "Tokenize", text=words).result(20)
    assert list(reply.token_ids) == TOKENIZER.encode(words).ids
