"""Pictures that are scaled as their request says, through real processes."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from airside.proto import airside_pb2 as pb
from tests.checkpoints import QWEN_MARK, make_qwen2_5_vl
from tests.system.local_server import LocalServer, read_failing
from tests.system.picture_requests import PATIENCE_S, answer, picture, request

pytestmark = pytest.mark.slow

SQUARE = picture(64, 64)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with LocalServer(make_qwen2_5_vl(tmp_path_factory.mktemp("qwen2_5_vl")), vision={"arena": "64MiB"}) as running:
        yield running


def within(min_pixels: int | None = None, max_pixels: int | None = None) -> pb.GenerateRequest:
    asked = request(f"{QWEN_MARK}?")
    asked.images.append(pb.Image(data=SQUARE, min_pixels=min_pixels, max_pixels=max_pixels))
    return asked


def test_fewer_pixels_are_fewer_tokens_and_another_picture(server: LocalServer) -> None:
    before = server.gauges()
    usual, small, again = (
        answer(server, asked) for asked in (within(), within(max_pixels=16 * 64), within(max_pixels=16 * 64))
    )
    after = server.gauges()
    assert usual.finished.usage.image_tokens > 16 >= small.finished.usage.image_tokens >= 9
    assert again.token_ids == small.token_ids
    assert after.image_cache_misses - before.image_cache_misses == 2
    assert after.image_cache_hits - before.image_cache_hits == 1
    counted = server.inference.CountTokens(
        pb.CountTokensRequest(prompt=f"{QWEN_MARK}?", images=within(max_pixels=16 * 64).images)
    )
    assert counted.prompt_tokens == small.finished.usage.prompt_tokens


def test_more_than_the_checkpoint_has_is_refused_with_the_limit(server: LocalServer) -> None:
    _, error = read_failing(server.inference.Generate(within(min_pixels=2**31 - 1), timeout=PATIENCE_S))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "bad_pixel_range: min_pixels is 2147483647" in error.details()
