"""Thousands of calls and sequences at once: each gets its answer or a refusal that says when to come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from airside.proto import airside_pb2 as pb
from tests.checkpoints import make_llama
from tests.real_processes import wait_until
from tests.system.local_server import LocalServer

pytestmark = pytest.mark.slow

NUM_CALLS = 3000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    model = make_llama(tmp_path_factory.mktemp("llama"))
    limits = {"max_queued_requests": 20_000, "max_queued_tokens": 1_000_000}
    with LocalServer(model, engine={"num_threads": 1, "limits": limits}) as running:
        yield running


def ending(call: grpc.CallIterator[pb.GenerateEvent]) -> str:
    """What became of a call: the reasons of its ends, or its status and whether it says when to come back."""
    try:
        ends = Counter(event.finished.reason for event in call if event.HasField("finished"))
    except grpc.RpcError as error:
        advice = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin", b"")
        return f"{error.code().name} {error.details()}{' RetryInfo' if b'RetryInfo' in advice else ''}"
    return " ".join(f"{count} {reason}" for reason, count in ends.items())


def test_as_many_calls_at_once_as_come(server: LocalServer) -> None:
    """One per user, all on one connection: no call ends in a way that nobody has caused."""
    calls = [
        server.inference.Generate(
            pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=[60 + number % 400]),
                stop=pb.Stop(max_tokens=1, ignore_eos=True),
                user=f"user {number} {'x' * 200}",
                cache_salt=f"{number} {'y' * 200}",
            ),
            timeout=120,
        )
        for number in range(NUM_CALLS)
    ]
    endings = Counter(map(ending, calls))
    refused = [words for words in endings if words != "1 length"]
    assert all(words.startswith("RESOURCE_EXHAUSTED") and words.endswith("RetryInfo") for words in refused), endings
    assert endings["1 length"] > NUM_CALLS / 2
    assert server.gauges().requests_finished["abort"] == 0


def test_ten_thousand_wait_and_half_of_them_leave(server: LocalServer) -> None:
    """Those that stay are all served, those that leave take nothing along; the engine goes on meanwhile."""
    before = server.gauges()
    calls = [
        server.inference.Generate(
            pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=[70, 71, 72, 73]),
                stop=pb.Stop(max_tokens=3, ignore_eos=True),
                user=f"user {number % 50}",
                priority=number % 3,
                structure=pb.Structure(regex="[a-z]{9,}") if number % 4 == 0 else None,
                n=16,
            ),
            timeout=120,
        )
        for number in range(625)
    ]
    for call in calls[::2]:
        call.cancel()
    with ThreadPoolExecutor(32) as pool:
        endings = Counter(pool.map(ending, calls[1::2]))
    assert endings == {"16 length": 312}
    wait_until(lambda: server.gauges().num_requests_waiting == 0, 30, "nobody waits")
    gauges = server.gauges()
    assert gauges.kv_blocks_live == gauges.num_requests_running == 0
    ended = sum(gauges.requests_finished.values()) - sum(before.requests_finished.values())
    assert ended >= 16 * 312
    assert gauges.requests_finished["length"] - before.requests_finished["length"] >= 16 * 312
