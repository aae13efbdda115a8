from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2

from airside.proto.messages import EngineState, GatewayHello
from tests.gateway.bad_options import BAD_OPTIONS, VOCAB_SIZE
from tests.gateway.client import Client, failure
from tests.gateway.conftest import IMAGE_BYTES_MAX, RunningGateway, Start, make_settings
from tests.gateway.scripted_controller import MAX_MODEL_LEN, ScriptedController
from tests.gateway.tiny_checkpoint import IMAGE_ID

PATIENCE_S = 20
"""What is wrongly let through would wait for a controller that is not there."""


def image(size: int) -> dict[str, str]:
    return {"data": base64.b64encode(b"x" * size).decode()}


GENERATE_ROWS: list[tuple[dict[str, Any], str, str]] = [
    # request, field at fault, what the message must say
    ({}, "prompt", "is missing; send either prompt or token_ids"),
    ({"prompt": ""}, "prompt", "is empty; send a text or token_ids"),
    ({"token_ids": {}}, "token_ids.ids", "is empty; send at least one token"),
    ({"token_ids": {"ids": [1, 2, VOCAB_SIZE]}}, "token_ids.ids[2]", f"is {VOCAB_SIZE}, but .* [0, {VOCAB_SIZE})"),
    ({"token_ids": {"ids": [-1]}}, "token_ids.ids[0]", "is -1, but"),
    (
        {"prompt": "a", "stop": {"min_tokens": MAX_MODEL_LEN}},
        "stop.min_tokens",
        "is 100, but the context holds 100 tokens in all",
    ),
    (
        {"token_ids": {"ids": [7] * MAX_MODEL_LEN}},
        "token_ids.ids",
        "has 100 tokens, but the context holds 100, at least",
    ),
    ({"token_ids": {"ids": [7] * (MAX_MODEL_LEN + 1)}}, "token_ids.ids", "has 101 tokens, but the context holds 100"),
    ({"prompt": "x" * 300}, "prompt", "has 300 tokens, but the context holds 100"),
    ({"prompt": "x" * 300_000}, "prompt", "has 300000 characters"),
    ({"prompt": "a <image>"}, "prompt", "has 1 image marks and the request has 0 images; write <image>"),
    ({"prompt": "a", "images": [image(1)]}, "prompt", "has 0 image marks and the request has 1 images"),
    (
        {"token_ids": {"ids": [IMAGE_ID] * 2}, "images": [image(1)]},
        "token_ids.ids",
        "has 2 image marks and .* 1 images",
    ),
    ({"prompt": "<image>", "images": [{}]}, "images[0]", "is empty; send one of data, url and data_uri"),
    ({"prompt": "<image>", "images": [{"data": ""}]}, "images[0].data", "is empty; send the bytes of an image file"),
    ({"prompt": "<image>", "images": [{"data_uri": ""}]}, "images[0].data_uri", "is no data URI; the form is data:im"),
    ({"prompt": "<image>", "images": [{"url": " "}]}, "images[0].url", "is empty; send the URL of an image file"),
    (
        {"prompt": "<image><image>", "images": [image(1), image(IMAGE_BYTES_MAX + 1)]},
        "images[1].data",
        "has 1001 bytes, at most 1000 are allowed",
    ),
    ({"prompt": "<image>" * 4, "images": [image(1)] * 4}, "images[3]", "has 4 images, at most 3 are allowed"),
    ({"prompt": "a", "request_id": "x" * 257}, "request_id", "has 257 bytes, at most 256 are allowed"),
    ({"prompt": "a", "request_id": "東" * 86}, "request_id", "has 258 bytes, at most 256 are allowed"),
    ({"prompt": "a", "request_id": "a\nb"}, "request_id", "holds the unprintable character U+000A"),
    ({"prompt": "a", "request_id": "a\u200bb"}, "request_id", "holds the unprintable character U+200B"),
    *BAD_OPTIONS,
]


def user(*parts: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"role": role, "parts": list(parts)}


CHAT_ROWS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "messages", "is empty; send at least one message"),
    (
        {"messages": [user({"text": "a"}, role="tool")]},
        "messages[0].role",
        "is 'tool', but must be one of system, user",
    ),
    ({"messages": [user({"text": "a"}), user()]}, "messages[1].parts", "is empty; send at least one part"),
    ({"messages": [user({})]}, "messages[0].parts[0]", "is empty; send a text or an image"),
    (
        {"messages": [user({"text": "a <image> b"})]},
        "messages[0].parts[0].text",
        "spells <image>, which marks an image",
    ),
    ({"messages": [user({"text": "a"}, {"image": {}})]}, "messages[0].parts[1].image", "is empty"),
    (
        {"messages": [user({"text": "a"}, {"image": {"data_uri": "data:text/html;base64,PGgxPg=="}})]},
        "messages[0].parts[1].image.data_uri",
        "states a type other than image/*",
    ),
    (
        {"messages": [user({"image": image(IMAGE_BYTES_MAX + 1)})]},
        "messages[0].parts[0].image.data",
        "has 1001 bytes, at most 1000 are allowed",
    ),
    ({"messages": [user(*[{"image": image(1)}] * 4)]}, "messages[0].parts[3].image", "has 4 images, at most 3"),
    ({"messages": [user({"text": "a"}), user({"text": "b"}, role="system")]}, "messages", "system comes first"),
    ({"messages": [user({"text": "x" * 300})]}, "messages", "tokens, but the context holds 100"),
    ({"messages": [user({"text": "a"})], "sampling": {"top_p": 0}}, "sampling.top_p", "is 0, but"),
    ({"messages": [user({"text": "a"})], "n": 17}, "n", "is 17, but must be in [1, 16]"),
    ({"messages": [user({"text": "a"})], "structure": {"choice": {}}}, "structure.choice", "has no texts"),
    ({"messages": [user({"text": "a"})], "drafts": {"force_golden": True}}, "drafts.force_golden", "needs golden"),
]


@pytest.fixture(scope="module")
def ready_client(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, pool: DescriptorPool) -> Iterator[Client]:
    """Of one gateway for all rows; the controller is not listening any more when they are sent."""
    settings = make_settings(tmp_path_factory.mktemp("run"), checkpoint)
    controller = ScriptedController(settings.endpoint)
    gateway = RunningGateway(settings)
    controller.expect(GatewayHello)
    gateway.wait_for_health("", health_pb2.HealthCheckResponse.SERVING)
    yield Client(pool, gateway.channel)
    gateway.stop()
    controller.hub.close()


def check(call: Any, field: str, message: str) -> None:
    failed = failure(call)
    assert failed.code == grpc.StatusCode.INVALID_ARGUMENT
    assert failed.fields == [field]
    assert failed.message.startswith(f"{field}: ")
    for words in message.split(" .* "):
        assert words in failed.message
    assert failed.retry_after_s is None


@pytest.mark.parametrize(("request_fields", "field", "message"), GENERATE_ROWS)
def test_generate_refuses(ready_client: Client, request_fields: dict[str, Any], field: str, message: str) -> None:
    check(ready_client.generate(timeout=PATIENCE_S, **request_fields), field, message)


@pytest.mark.parametrize(("request_fields", "field", "message"), CHAT_ROWS)
def test_chat_refuses(ready_client: Client, request_fields: dict[str, Any], field: str, message: str) -> None:
    check(ready_client.chat(timeout=PATIENCE_S, **request_fields), field, message)


def test_a_text_model_takes_no_images(start_gateway: Start, text_checkpoint: Any, pool: DescriptorPool) -> None:
    client = Client(pool, start_gateway(model_path=str(text_checkpoint)).channel)
    check(client.generate(prompt="a", images=[image(1)]), "images[0]", "this model takes text only")
    chat = client.chat(messages=[user({"text": "a"}, {"image": image(1)})])
    check(chat, "messages[0].parts[1].image", "this model takes text only")


@pytest.mark.parametrize("data", [b"\x12\x02\xff\xfe", b"\x12\xff"])
def test_what_is_no_message_is_refused(gateway: RunningGateway, data: bytes) -> None:
    failed = failure(gateway.channel.unary_stream("/airside.v1.Inference/Generate")(data, timeout=20))
    assert failed.code == grpc.StatusCode.INVALID_ARGUMENT
    assert "cannot be decoded" in failed.message


def test_a_message_over_the_limit_is_refused(client: Client) -> None:
    assert failure(client.generate(prompt="x" * (1 << 20))).code == grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("state", ["starting", "recovering"])
def test_an_engine_that_is_not_ready(
    controller: ScriptedController, start_gateway: Start, pool: DescriptorPool, state: str
) -> None:
    controller.state = EngineState(state, "rank 1 is loading", MAX_MODEL_LEN, 0, vision_ready=False)
    client = Client(pool, start_gateway().channel)
    failed = failure(client.generate(prompt="a"))
    assert failed.code == grpc.StatusCode.UNAVAILABLE
    assert failed.retry_after_s is not None
