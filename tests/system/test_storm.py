"""Everything that can be asked for, combined at random, at once, on a tight pool, while ranks die and hang.

Each request by itself on a server that does one thing at a time is the reference: its tokens, text, log-probabilities
and end must be the same, whoever else is there and whatever happens to the ranks.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from airside.proto import airside_pb2 as pb
from tests.checkpoints import make_idefics3, make_lfm2, make_llama, make_mimo
from tests.real_processes import wait_until
from tests.system.local_server import Answer, LocalServer
from tests.system.mixed_requests import STRUCTURES, mixed_request

pytestmark = pytest.mark.slow

NUM_REQUESTS = 48
POOL_BLOCKS = 48
ONE_BY_ONE = {"max_num_seqs": 1, "enable_prefix_caching": False, "async_scheduling": False, "num_threads": 1}
AT_ONCE = {"max_num_seqs": 16, "max_num_batched_tokens": 96, "num_threads": 1}


@dataclass(frozen=True)
class Outcome:
    """All that a client sees of one continuation."""

    token_ids: list[int]
    text: str
    end: tuple[str, str, str]  # reason, detail, stop match
    logprobs: list[float]
    prompt_logprobs: list[float]


def outcomes(server: LocalServer, request: pb.GenerateRequest) -> list[Outcome] | str:
    """One per continuation, or the status of the call; what every answer must keep to is checked.

    A request that comes while the ranks start again is refused, and is to be sent again.
    """
    events: list[pb.GenerateEvent] = []
    while not events:
        try:
            for event in server.inference.Generate(request, timeout=120):
                events.append(event)
        except grpc.RpcError as error:
            if events or error.code() is not grpc.StatusCode.UNAVAILABLE:
                return f"{error.code().name} {error.details()}"
            time.sleep(0.3)
    answers = [Answer(events, index) for index in range(request.n)]
    for index, answer in enumerate(answers):
        check_counts(request, answer, index)
    return [
        Outcome(
            answer.token_ids,
            answer.text,
            (answer.finished.reason, answer.finished.detail, answer.finished.stop_match),
            [record.logprob for record in answer.logprobs],
            [record.logprob for record in answer.prompt_logprobs],
        )
        for answer in answers
    ]


def check_counts(request: pb.GenerateRequest, answer: Answer, index: int) -> None:
    usage = answer.finished.usage
    assert usage.completion_tokens == len(answer.token_ids) <= request.stop.max_tokens
    assert usage.accepted_tokens <= usage.draft_tokens
    if request.output.HasField("logprobs"):
        assert [record.token_id for record in answer.logprobs] == answer.token_ids
        assert {len(record.top) for record in answer.logprobs} <= {request.output.logprobs}
    else:
        assert answer.logprobs == []
    is_asked = request.output.HasField("prompt_logprobs") and index == 0
    assert len(answer.prompt_logprobs) == (usage.prompt_tokens - 1 if is_asked else 0)


def assert_equal(outcome: list[Outcome] | str, reference: list[Outcome] | str, seed: int) -> None:
    if isinstance(outcome, str) or isinstance(reference, str):
        assert outcome == reference, f"request {seed}"
        return
    for one, other in zip(outcome, reference, strict=True):
        assert one.token_ids == other.token_ids, f"request {seed}"
        assert (one.text, one.end) == (other.text, other.end), f"request {seed}"
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3), f"request {seed}"
        assert one.prompt_logprobs == pytest.approx(other.prompt_logprobs, abs=1e-3), f"request {seed}"


def lose_ranks(server: LocalServer, how: list[signal.Signals]) -> None:
    """Ends the launch of ranks once for each signal, each time while it makes tokens."""

    def wait_for_tokens() -> None:
        made = server.gauges().generation_tokens
        wait_until(lambda: server.gauges().generation_tokens > made + 40, 60, "tokens of this launch")

    for group, sign in enumerate(how, start=2):
        wait_for_tokens()
        server.replace_ranks(group, sign)


FAMILIES: dict[str, tuple[Callable[[Path], Path], dict[str, object]]] = {
    "llama": (make_llama, {"drafts": {"method": "ngram"}}),
    "two ranks": (make_llama, {"tensor_parallel_size": 2, "drafts": {"method": "ngram"}}),
    "no drafts, two steps in flight": (make_llama, {}),
    "idefics3": (make_idefics3, {"drafts": {"method": "ngram"}}),
    "lfm2": (make_lfm2, {"drafts": {"method": "ngram"}}),
    "mimo": (make_mimo, {"drafts": {"method": "mtp"}}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_come_and_go(family: str, tmp_path: Path) -> None:
    make, engine = FAMILIES[family]
    model = make(tmp_path)
    first = 1000 * list(FAMILIES).index(family)
    seeds = range(first, first + NUM_REQUESTS)
    requests = [mixed_request(seed, takes_images=make is make_idefics3) for seed in seeds]
    with LocalServer(model, engine=ONE_BY_ONE) as server:
        alone = [outcomes(server, request) for request in requests]
    assert sum(not isinstance(outcome, str) for outcome in alone) > 0.8 * NUM_REQUESTS
    with LocalServer(model, kv_blocks=POOL_BLOCKS, engine={**AT_ONCE, **engine}) as server:
        for structure in STRUCTURES:  # checked now, so that nobody comes too late to be taken in
            assert server.generate(prompt="a", structure=structure, stop=pb.Stop(max_tokens=1)).token_ids
        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            are_lost = threading.Event()

            def until_ranks_are_lost(number: int) -> list[list[Outcome] | str]:
                """Once at least; however fast a model is, there is somebody to lose."""
                seen = [outcomes(server, requests[number])]
                while not are_lost.is_set():
                    seen.append(outcomes(server, requests[number]))
                return seen

            order = random.Random(first).sample(range(NUM_REQUESTS), NUM_REQUESTS)
            futures = {number: pool.submit(until_ranks_are_lost, number) for number in order}
            try:
                lose_ranks(server, [signal.SIGKILL, signal.SIGSTOP])
            finally:
                are_lost.set()
            together = [futures[number].result() for number in range(NUM_REQUESTS)]
        for seen, reference, seed in zip(together, alone, seeds, strict=True):
            for outcome in seen:
                assert_equal(outcome, reference, seed)
        wait_until(lambda: server.gauges().kv_blocks_live == 0, 10, "blocks free")
        gauges = server.gauges()
        assert gauges.num_requests_running == gauges.num_requests_waiting == gauges.state_slots_live == 0
        assert gauges.recomputed_tokens > 0
        assert not gauges.bus_messages_refused
