"""Pictures that differ in nothing but what they show, asked about with the same words: each gets its own answer.

Prefix cache, pixels and embeddings are all kept between requests; what they hold of one must never be taken for the
other, and must be found again for the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from airside.proto import airside_pb2 as pb
from tests.checkpoints import make_idefics3
from tests.real_processes import wait_until
from tests.system.local_server import Answer, LocalServer
from tests.system.picture_requests import PATIENCE_S, answer, is_idle, request

pytestmark = pytest.mark.slow

IMAGES = Path(__file__).parent.parent / "vision" / "images"
PAIR = {name: (IMAGES / f"pair_replay_{name}.png").read_bytes() for name in "ab"}
LONG_WORDS = "Of what comes here first there is more than one block, so that it is shared whatever the picture shows. "
BLOCK_TOKENS = 16
LOGPROB_ERROR_MAX = 1e-3
PROMPTS = {
    "picture first": ("<image>What is it?", ("a", "b")),
    "words first": (f"{LONG_WORDS}<image>What is it?", ("a", "b")),
    "two of them": (f"{LONG_WORDS}<image>and<image>?", ("ab", "ba", "aa", "bb")),
}
NOTHING_KEPT = {"cache": {"pixels": 1, "embeddings": 1}}
Case = tuple[str, str]
"""Which of `PROMPTS`, and the pictures in it."""
CASES: list[Case] = [(prompt, names) for prompt, (_, orders) in PROMPTS.items() for names in orders]


def ask(server: LocalServer, case: Case) -> Answer:
    """Tokens and how likely they were, which tells more pictures apart."""
    prompt, names = case
    files = [PAIR[name] for name in names]
    return answer(server, request(PROMPTS[prompt][0], *files, max_tokens=8, output=pb.Output(logprobs=0)))


def is_same(one: Answer, other: Answer) -> bool:
    """Chunks and neighbours may change the last digits of a log-probability."""
    pairs = zip(one.logprobs, other.logprobs, strict=True)
    return one.token_ids == other.token_ids and all(abs(a.logprob - b.logprob) < LOGPROB_ERROR_MAX for a, b in pairs)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_idefics3(tmp_path_factory.mktemp("idefics3"))


@pytest.fixture(scope="module")
def cold(checkpoint: Path) -> dict[Case, Answer]:
    """Answers of a server that keeps nothing, asked one after the other."""
    with LocalServer(checkpoint, vision=NOTHING_KEPT, engine={"enable_prefix_caching": False}) as server:
        answers = {case: ask(server, case) for case in CASES}
        for given in answers.values():
            assert given.finished.usage.cached_tokens == 0
        assert server.gauges().image_cache_bytes == 0
    return answers


@pytest.fixture(scope="module", params=[2048, 20], ids=["whole", "chunks"])
def warm(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[LocalServer]:
    """Everything is kept; chunks end inside pictures."""
    with LocalServer(checkpoint, engine={"max_num_batched_tokens": request.param}) as server:
        yield server


def test_the_pictures_decide(cold: dict[Case, Answer]) -> None:
    """Else the other tests would show nothing."""
    for prompt, (_, orders) in PROMPTS.items():
        for one, other in itertools.combinations(orders, 2):
            assert not is_same(cold[prompt, one], cold[prompt, other]), (prompt, one, other)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_one_after_the_other(warm: LocalServer, cold: dict[Case, Answer], prompt: str) -> None:
    orders = PROMPTS[prompt][1]
    for _ in range(3):
        for names in orders:
            assert is_same(ask(warm, (prompt, names)), cold[prompt, names]), names


def test_fifty_at_once(warm: LocalServer, cold: dict[Case, Answer]) -> None:
    cases = [CASES[number % len(CASES)] for number in range(50)]
    with ThreadPoolExecutor(len(cases)) as pool:
        answers = list(pool.map(lambda case: ask(warm, case), cases))
    wrong = [case for case, given in zip(cases, answers, strict=True) if not is_same(given, cold[case])]
    assert not wrong
    wait_until(lambda: is_idle(warm), PATIENCE_S, "everything given back")


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_same_again_is_found(warm: LocalServer, cold: dict[Case, Answer], case: Case) -> None:
    _, names = case
    ask(warm, case)
    before = warm.gauges()
    again = ask(warm, case)
    usage, after = again.finished.usage, warm.gauges()
    assert is_same(again, cold[case])
    assert usage.cached_images == len(names)
    assert usage.cached_tokens == (usage.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert after.image_cache_hits - before.image_cache_hits == len(names)
    assert after.image_cache_misses == before.image_cache_misses
    assert again.finished.timings.image_encode_s == 0
