"""As many pictures as marks, within the limits, each in its place; anything else is refused before any work is done."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from airside.proto import airside_pb2 as pb
from tests.checkpoints import make_idefics3
from tests.real_processes import wait_until
from tests.system.local_server import LocalServer, read_failing
from tests.system.picture_requests import PATIENCE_S, answer, in_new_file, is_idle, jobs_done, picture, request

pytestmark = pytest.mark.slow

IMAGES_MAX = 20
CONTEXT = 512
SQUARE_TOKENS = 34  # five tiles of four tokens, and what stands around them
MANY_PIXELS = picture(3000, 3000)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    vision = {"arena": "64MiB", "limits": {"max_images_per_prompt": IMAGES_MAX}}
    model = make_idefics3(tmp_path_factory.mktemp("idefics3"))
    with LocalServer(model, model={"max_model_len": CONTEXT}, vision=vision) as running:
        yield running


def work_done(server: LocalServer) -> tuple[int, ...]:
    """What no refused request adds to."""
    gauges = server.gauges()
    return (
        gauges.steps,
        gauges.image_cache_misses,
        gauges.image_cache_hits,
        gauges.image_bytes_waiting,
        jobs_done(server),
    )


def refusal(server: LocalServer, asked: pb.GenerateRequest) -> str:
    """The words of a request that was never accepted."""
    events, error = read_failing(server.inference.Generate(asked, timeout=PATIENCE_S))
    assert not events
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
    return str(error.details())


@pytest.mark.parametrize("as_ids", [False, True], ids=["text", "token ids"])
@pytest.mark.parametrize(
    ("prompt", "num_pictures"),
    [
        ("<image><image>?", 1),
        ("<image> and <image>?", 1),
        ("<image>?", 2),
        ("<image> and <image><image>?", 2),
        ("<image><image>?", 3),
        ("none?", 1),
        ("<image>?", 0),
    ],
)
def test_both_counts_are_told(server: LocalServer, prompt: str, num_pictures: int, as_ids: bool) -> None:
    asked = request(prompt, *(picture(64, 64, turn) for turn in range(num_pictures)))
    if as_ids:
        ids = server.inference.Tokenize(pb.TokenizeRequest(text=prompt)).token_ids
        asked.token_ids.ids.extend(ids)
    before = work_done(server)
    why = refusal(server, asked)
    num_marks = prompt.count("<image>")
    assert why.startswith("token_ids" if as_ids else "prompt"), why
    assert f"has {num_marks} image marks and the request has {num_pictures} images; write <image>" in why
    assert work_done(server) == before


def test_a_mark_in_the_text_of_a_chat_is_no_picture(server: LocalServer) -> None:
    parts = [pb.Part(text="What is <image>?"), pb.Part(image=pb.Image(data=picture(64, 64)))]
    chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user", parts=parts)])
    before = work_done(server)
    events, error = read_failing(server.inference.Chat(chat, timeout=PATIENCE_S))
    assert not events
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "messages[0].parts[0].text: spells <image>" in error.details()
    assert work_done(server) == before


def test_as_many_as_the_limit_are_taken_and_one_more_is_not(server: LocalServer) -> None:
    small = [picture(64, 8 + turn, turn) for turn in range(IMAGES_MAX + 1)]
    most = request("<image>" * IMAGES_MAX + "?", *small[:IMAGES_MAX])
    events = list(server.inference.Generate(most, timeout=PATIENCE_S))
    ready = {event.image_ready.index: event.image_ready.tokens for event in events if event.HasField("image_ready")}
    usage = events[-1].finished.usage
    assert sorted(ready) == list(range(IMAGES_MAX))
    assert usage.image_tokens == sum(ready.values())
    assert usage.completion_tokens == 4

    before = work_done(server)
    why = refusal(server, request("<image>" * (IMAGES_MAX + 1) + "?", *small))
    assert f"images[{IMAGES_MAX}]" in why
    assert f"has {IMAGES_MAX + 1} images, at most {IMAGES_MAX} are allowed; leave some out" in why
    assert work_done(server) == before


def test_tokens_are_counted_as_they_are_taken_and_no_picture_is_made(server: LocalServer) -> None:
    asked = request("<image> and <image>?", picture(64, 64, 1), picture(200, 40, 2))
    before = work_done(server)
    counted = server.inference.CountTokens(pb.CountTokensRequest(prompt=asked.prompt, images=asked.images))
    assert work_done(server) == before
    events = list(server.inference.Generate(asked, timeout=PATIENCE_S))
    usage = events[-1].finished.usage
    assert (counted.prompt_tokens, counted.image_tokens) == (usage.prompt_tokens, usage.image_tokens)
    ready = {event.image_ready.index: event.image_ready.tokens for event in events if event.HasField("image_ready")}
    assert list(counted.tokens_of_images) == [ready[0], ready[1]]
    assert ready[0] != ready[1]


@pytest.mark.parametrize("extra", [0, 1])
def test_the_context_counts_every_token_of_a_picture(server: LocalServer, extra: int) -> None:
    """Up to the last place, which is left for a new token."""
    num_pictures = 14
    text = [70] * (CONTEXT - 1 - num_pictures * SQUARE_TOKENS + extra)
    asked = request("", *(picture(64, 64, turn) for turn in range(num_pictures)))
    asked.token_ids.ids.extend([*server.inference.Tokenize(pb.TokenizeRequest(text="<image>" * 14)).token_ids, *text])
    call = server.inference.Generate(asked, timeout=PATIENCE_S)
    if extra:
        events, error = read_failing(call)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"{CONTEXT} tokens" in error.details()
    else:
        events = list(call)
        assert events[-1].finished.usage.prompt_tokens == CONTEXT - 1
        assert events[-1].finished.usage.completion_tokens == 1
    wait_until(lambda: is_idle(server), PATIENCE_S, "everything given back")


def test_too_many_tokens_are_refused_before_the_pictures_are_made(server: LocalServer) -> None:
    """Their headers say how many there are. What was begun meanwhile is given up."""
    before = jobs_done(server)
    files = [in_new_file(MANY_PIXELS, number) for number in range(IMAGES_MAX)]
    call = server.inference.Generate(request("<image>" * IMAGES_MAX + "?", *files), timeout=PATIENCE_S)
    events, error = read_failing(call)
    assert [event.WhichOneof("event") for event in events] == ["accepted", "finished"]
    end = events[-1].finished
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (end.reason, end.detail) == ("prompt_length_exceeded", error.details())
    image_tokens = IMAGES_MAX * SQUARE_TOKENS
    assert f"the prompt has {image_tokens + 1} tokens" in end.detail
    assert f"the context of {CONTEXT} tokens leaves room for {CONTEXT - 1}" in end.detail
    assert f"{image_tokens} of its tokens are of images: send fewer or smaller ones" in end.detail
    wait_until(lambda: is_idle(server), PATIENCE_S, "everything given back")
    assert answer(server, request("<image>?", picture(60, 60, 5))).token_ids  # one worker: it is done with the others
    assert jobs_done(server) - before <= 4


def test_each_picture_is_where_its_mark_is(server: LocalServer) -> None:
    """In every order, alone and all orders at once; the largest is ready last, wherever it stands."""
    files = [MANY_PIXELS, picture(64, 20, 1), picture(70, 70, 2)]
    orders = list(itertools.permutations(range(3)))
    prompt = "first<image>then<image>and<image>What is it?"

    def tokens(order: tuple[int, ...], number: int) -> tuple[int, ...]:
        made = [in_new_file(files[index], number) for index in order]
        return tuple(answer(server, request(prompt, *made, max_tokens=8)).token_ids)

    alone = [tokens(order, 100 + number) for number, order in enumerate(orders)]
    assert len(set(alone)) == len(orders), "the order decides"
    with ThreadPoolExecutor(len(orders)) as pool:
        assert list(pool.map(tokens, orders, range(200, 200 + len(orders)))) == alone
        assert list(pool.map(tokens, orders, [300] * len(orders))) == alone  # each is made once for all of them


def test_a_picture_may_stand_in_several_places(server: LocalServer) -> None:
    one, other = picture(64, 64, 7), picture(64, 64, 100)
    prompt = "<image>and<image>and<image>?"
    answers = {
        order: tuple(answer(server, request(prompt, *order, max_tokens=8)).token_ids)
        for order in ((one, one, other), (one, other, one), (other, one, one), (one, one, one))
    }
    assert len(set(answers.values())) == 4
    copies = [in_new_file(one, 1), in_new_file(other, 2), in_new_file(one, 3)]
    assert tuple(answer(server, request(prompt, *copies, max_tokens=8)).token_ids) == answers[one, other, one]
