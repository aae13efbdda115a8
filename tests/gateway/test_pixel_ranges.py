"""Within how many pixels a picture is scaled, as a request says it."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool

from airside.proto.image_content import content_hash
from airside.proto.messages import AddRequest, CountImages
from tests.gateway.client import Client, failure
from tests.gateway.conftest import Start
from tests.gateway.scripted_controller import ScriptedController
from tests.gateway.test_generate import image

FILE = b"file"


def sent(client: Client, controller: ScriptedController, *images: dict[str, object]) -> AddRequest:
    call = client.generate(prompt="<image>" * len(images), images=list(images))
    request = controller.accept()
    call.cancel()
    return request


@pytest.fixture
def scaling(start_gateway: Start, pool: DescriptorPool) -> Client:
    """Of a model that takes pictures of any size."""
    return Client(pool, start_gateway(takes_pixel_ranges=True).channel)


def test_each_picture_has_its_own_and_what_is_left_out_is_the_checkpoints(
    scaling: Client, controller: ScriptedController
) -> None:
    request = sent(
        scaling,
        controller,
        image(FILE) | {"min_pixels": 100, "max_pixels": 2000},
        image(FILE),
        image(FILE) | {"max_pixels": 2000},
    )
    assert (request.image_min_pixels, request.image_max_pixels) == ([100, 0, 0], [2000, 0, 2000])
    assert len(set(request.image_hashes)) == 3, "equal files, and pictures that are not"


def test_a_file_alone_is_hashed_alone(client: Client, controller: ScriptedController) -> None:
    request = sent(client, controller, image(FILE))
    assert (request.image_min_pixels, request.image_max_pixels) == ([], [])
    assert request.image_hashes == [content_hash(FILE)]


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"min_pixels": 0}, "min_pixels", "is 0, but must be at least 1"),
        ({"max_pixels": -5}, "max_pixels", "is -5, but must be at least 1"),
        ({"min_pixels": 9, "max_pixels": 8}, "min_pixels", "is 9, more than max_pixels, 8"),
    ],
)
def test_what_makes_no_range(scaling: Client, fields: dict[str, int], field: str, message: str) -> None:
    failed = failure(scaling.generate(prompt="<image>", images=[image(FILE) | fields]))
    assert (failed.code, failed.fields) == (grpc.StatusCode.INVALID_ARGUMENT, [f"images[0].{field}"])
    assert message in failed.message


def test_a_model_with_one_way_refuses_them_in_a_chat_too(client: Client) -> None:
    parts = [{"image": image(FILE) | {"max_pixels": 2000}}]
    failed = failure(client.chat(messages=[{"role": "user", "parts": parts}]))
    field = "messages[0].parts[0].image.max_pixels"
    assert (failed.code, failed.fields) == (grpc.StatusCode.INVALID_ARGUMENT, [field])
    assert "scales each picture in one way only; leave it out" in failed.message


def test_they_count_where_tokens_are_counted(scaling: Client, controller: ScriptedController) -> None:
    images = [image(FILE), image(FILE) | {"max_pixels": 2000}]
    _call = scaling.start("Inference", "CountTokens", prompt="<image><image>", images=images)  # cancelled if forgotten
    query = controller.expect(CountImages)
    assert (query.min_pixels, query.max_pixels) == ([0, 0], [0, 2000])
