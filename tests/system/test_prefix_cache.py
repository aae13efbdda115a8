"""The prefix cache over gRPC: hits change no token, and are told."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

from airside.proto import airside_pb2 as pb
from tests.checkpoints import make_idefics3
from tests.system.local_server import Answer, LocalServer

pytestmark = pytest.mark.slow

GREEDY = pb.Sampling(temperature=0)
TEN = pb.Stop(max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module", params=[2048, 16], ids=["whole", "chunks"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    model = make_idefics3(tmp_path_factory.mktemp("idefics3"))
    with LocalServer(model, kv_blocks=40, engine={"max_num_batched_tokens": request.param}) as running:
        yield running


def random_ids(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(60, 512) for _ in range(count)]


def noise(seed: int) -> bytes:
    buffer = io.BytesIO()
    Image.frombytes("RGB", (48, 48), random.Random(seed).randbytes(3 * 48 * 48)).save(buffer, "PNG")
    return buffer.getvalue()


def ask(server: LocalServer, request: pb.GenerateRequest) -> Answer:
    return Answer(list(server.inference.Generate(request, timeout=60)))


@pytest.mark.parametrize("with_picture", [False, True], ids=["text", "picture"])
@pytest.mark.parametrize("num_tokens", [15, 16, 17, 31, 32, 33, 48])
def test_the_same_prompt_again_and_again(server: LocalServer, num_tokens: int, with_picture: bool) -> None:
    """Three times in a row and four at once; a prompt that the cache has whole still computes its last token."""
    ids = random_ids(num_tokens + 100 * with_picture, num_tokens)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=GREEDY, stop=TEN)
    if with_picture:
        mark = server.inference.Tokenize(pb.TokenizeRequest(text="<image>")).token_ids
        request.token_ids.ids.extend(mark)
        request.images.add(data=noise(num_tokens))
    answers = [ask(server, request) for _ in range(3)]
    with ThreadPoolExecutor(4) as pool:
        answers += pool.map(lambda _: ask(server, request), range(4))
    assert len({tuple(answer.token_ids) for answer in answers}) == 1
    usages = [answer.finished.usage for answer in answers]
    assert usages[0].cached_tokens < 16
    for usage in usages[1:]:
        assert usage.prompt_tokens == usages[0].prompt_tokens
        if with_picture:  # the text before it may be looked up before its pixels are in
            assert (num_tokens - 1) // 16 * 16 <= usage.cached_tokens < usage.prompt_tokens
        else:
            assert usage.cached_tokens == (usage.prompt_tokens - 1) // 16 * 16


def test_another_picture_or_salt_is_another_prefix(server: LocalServer) -> None:
    def cached(seed: int, salt: str = "") -> tuple[int, list[int]]:
        request = pb.GenerateRequest(prompt="<image>" + "What is it? " * 4, sampling=GREEDY, stop=TEN, cache_salt=salt)
        request.images.add(data=noise(seed))
        answer = ask(server, request)
        return answer.finished.usage.cached_tokens, answer.token_ids

    first_hits, first = cached(1000)
    assert first_hits == 0
    assert cached(1001)[0] == 0, "the picture comes first, so nothing is shared"
    assert cached(1000, salt="mine")[0] == 0
    again_hits, again = cached(1000)
    assert again_hits > 0
    assert again == first
    assert cached(1000, salt="mine")[0] == again_hits


def prompt_records(server: LocalServer, request: pb.GenerateRequest) -> list[tuple[int, float, list[int]]]:
    answer = ask(server, request)
    return [(one.token_id, one.logprob, [top.token_id for top in one.top]) for one in answer.prompt_logprobs]


@pytest.mark.parametrize("with_picture", [False, True], ids=["text", "picture"])
def test_prompt_logprobs_cold_and_warm(server: LocalServer, with_picture: bool) -> None:
    """One record for each prompt token but the first, whatever of the prompt is in the cache."""
    ids = random_ids(5, 100)
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=ids), sampling=GREEDY, stop=TEN, output=pb.Output(prompt_logprobs=3, logprobs=0)
    )
    if with_picture:
        mark = list(server.inference.Tokenize(pb.TokenizeRequest(text="<image>")).token_ids)
        request.token_ids.ids[:] = ids[:30] + mark + ids[30:]
        request.images.add(data=noise(5))
    cold = prompt_records(server, request)
    plain = pb.GenerateRequest()
    plain.CopyFrom(request)
    plain.ClearField("output")
    filled = ask(server, plain)
    assert ask(server, plain).finished.usage.cached_tokens > 0, "the cache is warm"
    warm = prompt_records(server, request)
    assert len(cold) == filled.finished.usage.prompt_tokens - 1
    told = [token for token, _, _ in cold]
    assert told[:29] == ids[1:30]
    assert told[-70:] == ids[30:]
    assert [(token, tops) for token, _, tops in warm] == [(token, tops) for token, _, tops in cold]
    assert [logprob for _, logprob, _ in warm] == pytest.approx([logprob for _, logprob, _ in cold], abs=1e-5)
