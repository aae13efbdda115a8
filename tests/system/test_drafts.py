"""Draft tokens over gRPC: an end inside an accepted run is as exact as without, and wrong drafts change nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from scipy.stats import chi2_contingency

from airside.proto import airside_pb2 as pb
from tests.checkpoints import make_llama
from tests.system.local_server import Answer, LocalServer

pytestmark = pytest.mark.slow

PROMPT = "The small red circle is"
LENGTH = 24


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    model = make_llama(tmp_path_factory.mktemp("llama"))
    with LocalServer(model, engine={"drafts": {"method": "ngram", "max_tokens": 8}, "max_num_seqs": 64}) as running:
        yield running


def ask(server: LocalServer, drafts: pb.Drafts | None, **fields: Any) -> Answer:
    request = pb.GenerateRequest(**{"prompt": PROMPT, "sampling": pb.Sampling(temperature=0), **fields})
    request.drafts.CopyFrom(drafts if drafts is not None else pb.Drafts(max_tokens=0))
    return Answer(list(server.inference.Generate(request, timeout=60)))


@pytest.fixture(scope="module")
def plain(server: LocalServer) -> Answer:
    return ask(server, None, stop=pb.Stop(max_tokens=LENGTH, ignore_eos=True))


def golden(plain: Answer, max_tokens: int, acceptance: float = 1.0) -> pb.Drafts:
    """The model as its own drafter: what it makes anyway, spoilt as far as is asked for."""
    return pb.Drafts(max_tokens=max_tokens, golden=pb.TokenIds(ids=plain.token_ids), golden_acceptance=acceptance)


@pytest.mark.parametrize("max_tokens", [1, 2, 4, 8])
def test_ends_inside_an_accepted_run(server: LocalServer, plain: Answer, max_tokens: int) -> None:
    """Each token in turn is the stop token, each length the limit: cut at the right place."""
    drafts = golden(plain, max_tokens)
    output = pb.Output(logprobs=0)

    def by_token(index: int) -> tuple[Answer, int, str]:
        stop = pb.Stop(max_tokens=LENGTH, ignore_eos=True, token_ids=[plain.token_ids[index]])
        cut = plain.token_ids.index(plain.token_ids[index]) + 1
        return ask(server, drafts, stop=stop, output=output), cut, "stop"

    def by_length(length: int) -> tuple[Answer, int, str]:
        stop = pb.Stop(max_tokens=length, ignore_eos=True)
        return ask(server, drafts, stop=stop, output=output), length, "length"

    with ThreadPoolExecutor(8) as pool:
        outcomes = [*pool.map(by_token, range(3, 21)), *pool.map(by_length, range(1, 21))]
    for answer, cut, reason in outcomes:
        assert answer.token_ids == plain.token_ids[:cut]
        assert answer.finished.reason == reason
        assert answer.finished.usage.completion_tokens == len(answer.logprobs) == cut
        assert answer.finished.usage.accepted_tokens <= answer.finished.usage.draft_tokens


@pytest.mark.parametrize("max_tokens", [1, 4, 8])
def test_stop_strings_inside_an_accepted_run(server: LocalServer, plain: Answer, max_tokens: int) -> None:
    for begin in range(0, len(plain.text) - 3, 5):
        wanted = plain.text[begin : begin + 3]
        answer = ask(
            server,
            golden(plain, max_tokens),
            stop=pb.Stop(max_tokens=LENGTH, ignore_eos=True, strings=[wanted]),
            output=pb.Output(logprobs=0),
        )
        undrafted = ask(server, None, stop=pb.Stop(max_tokens=LENGTH, ignore_eos=True, strings=[wanted]))
        assert answer.text == undrafted.text == plain.text[: plain.text.index(wanted)]
        assert answer.token_ids == undrafted.token_ids
        assert (answer.finished.reason, answer.finished.stop_match) == ("stop", wanted)
        assert answer.finished.usage.completion_tokens == len(answer.token_ids) == len(answer.logprobs)


@pytest.mark.parametrize("at_once", [1, 8])
@pytest.mark.parametrize("acceptance", [1.0, 0.5, 0.0])
def test_right_and_wrong_drafts(server: LocalServer, plain: Answer, acceptance: float, at_once: int) -> None:
    drafts = golden(plain, 4, acceptance)
    with ThreadPoolExecutor(at_once) as pool:
        stop = pb.Stop(max_tokens=LENGTH, ignore_eos=True)
        answers = list(pool.map(lambda _: ask(server, drafts, stop=stop), range(at_once)))
    for answer in answers:
        assert answer.token_ids == plain.token_ids
        usage = answer.finished.usage
        assert usage.draft_tokens > 0
        share = usage.accepted_tokens / usage.draft_tokens
        assert share == 1.0 if acceptance == 1.0 else share < 0.9
        assert usage.accepted_tokens > 0 or acceptance < 1.0
        assert usage.accepted_tokens == 0 or acceptance > 0.0


def test_sampling_keeps_its_distribution(server: LocalServer, plain: Answer) -> None:
    """Two thousand second tokens under sampling, half of them verified drafts: chi-square against undrafted ones."""
    sampling = pb.Sampling(temperature=1.0, top_k=6)

    def second_token(seed: int, drafts: pb.Drafts | None) -> int:
        sampling_of = pb.Sampling(temperature=sampling.temperature, top_k=sampling.top_k, seed=seed)
        answer = ask(server, drafts, sampling=sampling_of, stop=pb.Stop(max_tokens=2, ignore_eos=True))
        return answer.token_ids[1]

    drafts = golden(plain, 1)
    with ThreadPoolExecutor(16) as pool:
        drafted = Counter(pool.map(lambda seed: second_token(seed, drafts), range(2000)))
        undrafted = Counter(pool.map(lambda seed: second_token(seed + 10_000, None), range(2000)))
    common = [token for token in drafted | undrafted if drafted[token] + undrafted[token] >= 10]
    table = [[counts[token] for token in common] for counts in (drafted, undrafted)]
    assert chi2_contingency(table).pvalue > 0.001
