"""Room for exactly one large picture: whoever can be answered is, nobody spins, and what can never fit is told why.

There are two such budgets: `vision.cache.embeddings`, of what the vision tower makes of pictures, which are encoded
again when they are needed once more; and `vision.arena`, of pixels, which are held until their request ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from airside.proto import airside_pb2 as pb
from tests.checkpoints import IMAGE_TOKENS_PER_TILE, TILE_PIXELS, make_idefics3
from tests.real_processes import wait_until
from tests.system.local_server import LocalServer, read_failing
from tests.system.picture_requests import PATIENCE_S, answer, is_idle, picture, request

pytestmark = pytest.mark.slow

HIDDEN = 128
SEGMENT_HEADER_BYTES = 4096
SQUARE_TILES, WIDE_TILES = 5, 3  # two by two, or two by one, and the whole picture
MANY = 25
CHUNK = 24


def slab_bytes(num_tiles: int) -> int:
    """Pixels as float32, and a mask."""
    return num_tiles * TILE_PIXELS**2 * (3 * 4 + 1)


def embedding_bytes(num_tiles: int) -> int:
    return num_tiles * IMAGE_TOKENS_PER_TILE * HIDDEN * 4


def square(turn: int) -> bytes:
    return picture(800, 800, turn)


def wide(turn: int) -> bytes:
    return picture(800, 400, turn)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_idefics3(tmp_path_factory.mktemp("idefics3"))


@pytest.fixture(scope="module")
def roomy(checkpoint: Path) -> Iterator[LocalServer]:
    """Room for all there is."""
    with LocalServer(checkpoint, vision={"limits": {"max_images_per_prompt": MANY}}) as server:
        yield server


@pytest.fixture(scope="module")
def few_embeddings(checkpoint: Path) -> Iterator[LocalServer]:
    """Embeddings of one square picture are kept between steps, and chunks end inside pictures."""
    cache = {"embeddings": embedding_bytes(SQUARE_TILES)}
    vision = {"cache": cache, "limits": {"max_images_per_prompt": MANY}}
    with LocalServer(checkpoint, vision=vision, engine={"max_num_batched_tokens": CHUNK}) as server:
        yield server


@pytest.fixture(scope="module")
def small_arena(checkpoint: Path) -> Iterator[LocalServer]:
    """The pixels of one wide picture fit, and its embeddings."""
    cache = {"embeddings": embedding_bytes(WIDE_TILES)}
    arena = SEGMENT_HEADER_BYTES + slab_bytes(WIDE_TILES)
    vision = {"arena": arena, "cache": cache, "limits": {"max_images_per_prompt": MANY}}
    with LocalServer(checkpoint, vision=vision) as server:
        yield server


@contextmanager
def no_idle_steps(server: LocalServer) -> Iterator[None]:
    """Each step computes a token at least, so that there are never more steps than tokens."""
    before = server.gauges()
    yield
    wait_until(lambda: is_idle(server), PATIENCE_S, "everything given back")
    after = server.gauges()
    tokens = sum(
        getattr(after, name) - getattr(before, name)
        for name in ("prompt_tokens", "generation_tokens", "recomputed_tokens")
    )
    assert after.steps - before.steps <= tokens + 2  # one may be planned in vain at the end, and one at the start


def two() -> pb.GenerateRequest:
    return request("<image>one two three four five<image>?", square(1), square(2))


def same_and_others() -> pb.GenerateRequest:
    return request("<image>" * MANY + "?", *[wide(1)] * 5, *(wide(turn) for turn in range(2, MANY - 3)))


def test_exactly_one_is_kept(few_embeddings: LocalServer) -> None:
    """Else the tests below would show nothing. The words before the pictures differ, so that no prefix is found."""

    def encode_s(words: str, *files: bytes) -> float:
        asked = request(f"{words} are the first words" + "<image>" * len(files) + "?", *files)
        return answer(few_embeddings, asked).finished.timings.image_encode_s

    assert encode_s("These", square(3)) > 0
    assert encode_s("Those", square(3)) == 0
    assert encode_s("They", square(3), square(4)) > 0
    assert encode_s("And they", square(3), square(4)) > 0


@pytest.mark.parametrize("make", [two, same_and_others])
def test_a_prompt_with_more_pictures_than_embeddings_are_kept(
    few_embeddings: LocalServer, roomy: LocalServer, make: Callable[[], pb.GenerateRequest]
) -> None:
    expected = answer(roomy, make()).token_ids
    with no_idle_steps(few_embeddings):
        assert answer(few_embeddings, make()).token_ids == expected
        assert answer(few_embeddings, make()).token_ids == expected


def each_alone(server: LocalServer, asked: list[pb.GenerateRequest]) -> list[list[int]]:
    return [answer(server, one).token_ids for one in asked]


def all_at_once(server: LocalServer, asked: list[pb.GenerateRequest], cancelled: tuple[int, ...]) -> list[list[int]]:
    """Answers of those that are not cancelled while most of them wait."""
    calls = [server.inference.Generate(one, timeout=PATIENCE_S) for one in asked]
    for call in calls:
        assert next(call).HasField("accepted")
    for index in cancelled:
        calls[index].cancel()
    kept = [call for index, call in enumerate(calls) if index not in cancelled]
    with ThreadPoolExecutor(len(kept)) as pool:
        events = list(pool.map(list, kept))
    return [[token for event in one for token in event.delta.token_ids] for one in events]


@pytest.mark.parametrize("cancelled", [(), (1, 3, 4)])
def test_prompts_with_one_picture_each_take_turns(
    few_embeddings: LocalServer, small_arena: LocalServer, roomy: LocalServer, cancelled: tuple[int, ...]
) -> None:
    first = 20 if cancelled else 10  # so that no picture was seen before
    asked = [request(f"{turn}<image>What is it?", wide(turn), max_tokens=40) for turn in range(first, first + 6)]
    expected = [tokens for index, tokens in enumerate(each_alone(roomy, asked)) if index not in cancelled]
    for server in (few_embeddings, small_arena):
        with no_idle_steps(server):
            assert all_at_once(server, asked, cancelled) == expected


def test_the_same_picture_is_one_picture(small_arena: LocalServer, roomy: LocalServer) -> None:
    asked = request("<image>and" * 5 + "?", *[wide(50)] * 5)
    with no_idle_steps(small_arena):
        assert answer(small_arena, asked).token_ids == answer(roomy, asked).token_ids


@pytest.mark.parametrize("make", [lambda: request("<image>and<image>?", wide(60), wide(61)), same_and_others])
def test_pixels_that_never_fit_together_are_told_so(
    small_arena: LocalServer, make: Callable[[], pb.GenerateRequest]
) -> None:
    """With others that fit before and behind them."""
    others = [request(f"{turn}<image>?", wide(turn), max_tokens=20) for turn in (71, 72, 73)]
    with no_idle_steps(small_arena), ThreadPoolExecutor(3) as pool:
        before = pool.submit(answer, small_arena, others[0])
        call = small_arena.inference.Generate(make(), timeout=PATIENCE_S)
        behind = [pool.submit(answer, small_arena, one) for one in others[1:]]
        events, error = read_failing(call)
        assert all(len(future.result().token_ids) == 20 for future in (before, *behind))
    end = events[-1].finished
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (end.reason, end.detail) == ("vision_failed", error.details())
    room = slab_bytes(WIDE_TILES)
    why = f"its pixels and those of the request's other images take more than {room} bytes (vision.arena)"
    assert why in end.detail
    assert end.detail.startswith("image ")
    assert "send fewer or smaller ones" in end.detail


def test_a_picture_that_never_fits_is_told_so(small_arena: LocalServer) -> None:
    asked = request("<image>and<image>?", wide(80), square(81))
    with no_idle_steps(small_arena):
        events, error = read_failing(small_arena.inference.Generate(asked, timeout=PATIENCE_S))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert events[-1].finished.detail == error.details()
    sizes = f"its tensors take {slab_bytes(SQUARE_TILES)} bytes; the arena has {slab_bytes(WIDE_TILES)} (vision.arena)"
    assert error.details() == f"image 1: arena_too_small: {sizes}"
    assert len(answer(small_arena, request("<image>?", wide(82))).token_ids) == 4
