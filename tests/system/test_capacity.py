"""Requests at and beyond what fits, on real processes: nobody behind them waits for ever, every count is exact."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from airside.proto import airside_pb2 as pb
from tests.checkpoints import make_llama
from tests.real_processes import wait_until
from tests.system.local_server import LocalServer, read_failing

pytestmark = pytest.mark.slow

GREEDY = pb.Sampling(temperature=0)
POOL_BLOCKS = 64
POOL_TOKENS = POOL_BLOCKS * 16
CONTEXT = 48


@pytest.fixture(scope="module")
def small_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """A pool as long as the context: 64 blocks of 16."""
    model = make_llama(tmp_path_factory.mktemp("llama"), max_position_embeddings=2048)
    with LocalServer(model, kv_blocks=POOL_BLOCKS, engine={"max_num_seqs": 16}) as running:
        yield running


@pytest.fixture(scope="module")
def short_context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    model = make_llama(tmp_path_factory.mktemp("llama"))
    engine = {"max_num_seqs": 4, "limits": {"max_queued_requests": 16}}
    with LocalServer(model, model={"max_model_len": CONTEXT}, engine=engine) as running:
        yield running


@pytest.fixture(scope="module")
def few_seats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """Four sequences run at a time, each for as long as a test needs them to."""
    model = make_llama(tmp_path_factory.mktemp("llama"), max_position_embeddings=2048)
    with LocalServer(model, engine={"max_num_seqs": 4}) as running:
        yield running


def ask(server: LocalServer, num_tokens: int, max_tokens: int | None = None) -> Any:
    stop = pb.Stop(ignore_eos=True) if max_tokens is None else pb.Stop(ignore_eos=True, max_tokens=max_tokens)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[70] * num_tokens), sampling=GREEDY, stop=stop)
    return server.inference.Generate(request, timeout=60)


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("blocks", [POOL_BLOCKS - 1, POOL_BLOCKS])
def test_prompts_around_the_pool(small_pool: LocalServer, blocks: int, extra: int) -> None:
    """One that can never get blocks is told so at once; one whose output cannot fit ends with the pool's last token."""
    num_tokens = blocks * 16 + extra
    call = ask(small_pool, num_tokens)
    with ThreadPoolExecutor(10) as pool:
        behind = [pool.submit(small_pool.generate, prompt=f"Small {i}", stop=pb.Stop(max_tokens=4)) for i in range(10)]
        if num_tokens >= POOL_TOKENS:
            events, error = read_failing(call)
            assert events == []
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert str(num_tokens) in error.details()
            assert str(POOL_TOKENS) in error.details()
        else:
            finished = list(call)[-1].finished
            assert (finished.reason, finished.detail) == ("length", f"the KV pool of {POOL_TOKENS} tokens is full")
            assert finished.usage.completion_tokens == POOL_TOKENS - num_tokens
        for answer in behind:
            assert answer.result().finished.reason in ("stop", "length")
    wait_until(lambda: small_pool.gauges().kv_blocks_live == 0, 10, "blocks free")


@pytest.mark.parametrize("max_tokens", [1, 2, CONTEXT, None])
@pytest.mark.parametrize("num_tokens", [CONTEXT - 2, CONTEXT - 1, CONTEXT, CONTEXT + 1])
def test_the_context_is_exact(short_context: LocalServer, num_tokens: int, max_tokens: int | None) -> None:
    """Prompt and output together are never longer than the context; a prompt that leaves no room is refused."""
    call = ask(short_context, num_tokens, max_tokens)
    if num_tokens >= CONTEXT:
        events, error = read_failing(call)
        assert events == []
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"has {num_tokens} tokens, but the context holds {CONTEXT}" in error.details()
    else:
        room = CONTEXT - num_tokens
        events = list(call)
        made = [token_id for event in events for token_id in event.delta.token_ids]
        finished = events[-1].finished
        assert finished.reason == "length"
        assert len(made) == finished.usage.completion_tokens == min(room, max_tokens or room)
        assert finished.usage.prompt_tokens == num_tokens
    assert short_context.generate(prompt="a", stop=pb.Stop(max_tokens=2, ignore_eos=True)).token_ids


def test_a_full_queue_says_when_to_come_back(short_context: LocalServer) -> None:
    """Sixteen may wait; of forty sent at once, the others are refused with a hint, and none is lost."""

    refusals: list[grpc.RpcError] = []

    def outcome(_: int) -> str:
        try:
            return list(ask(short_context, 4))[-1].finished.reason
        except grpc.RpcError as error:
            refusals.append(error)
            return "refused"

    with ThreadPoolExecutor(40) as pool:
        outcomes = list(pool.map(outcome, range(40)))
    assert set(outcomes) == {"length", "refused"}
    assert outcomes.count("length") >= 16
    for error in refusals:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "requests are waiting" in error.details()
        assert b"RetryInfo" in dict(error.trailing_metadata())["grpc-status-details-bin"]
    assert short_context.generate(prompt="a", stop=pb.Stop(max_tokens=2, ignore_eos=True)).finished.reason == "length"


def test_one_users_crowd_does_not_delay_another(few_seats: LocalServer) -> None:
    """Eight requests of one user wait when another's comes, and four run; it is among the next four."""

    def send(user: str, max_tokens: int) -> Any:
        stop = pb.Stop(ignore_eos=True, max_tokens=max_tokens)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[70] * 4), sampling=GREEDY, stop=stop, user=user)
        call = few_seats.inference.Generate(request, timeout=60)
        assert next(call).HasField("accepted")
        return call

    running = [send("crowd", 2000) for _ in range(4)]
    for call in running:
        assert next(call).HasField("delta")
    waiting = [send("crowd", 2000) for _ in range(8)]
    single = send("single", 4)
    for call in running:
        call.cancel()
    assert list(single)[-1].finished.reason == "length"
    assert few_seats.gauges().num_requests_waiting >= 4
    for call in waiting:
        call.cancel()
