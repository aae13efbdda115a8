"""Preempted and recomputed, over gRPC: the client sees a pause, and then exactly what it would have seen anyway."""

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

NUM_REQUESTS = 12


@pytest.fixture(scope="module", params=["whole", "chunks"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """A pool for about four of the twelve requests."""
    model = make_idefics3(tmp_path_factory.mktemp("idefics3"))
    step_tokens = {"whole": 2048, "chunks": 32}[request.param]
    engine = {"max_num_seqs": 12, "max_num_batched_tokens": step_tokens}
    with LocalServer(model, kv_blocks=24, engine=engine) as running:
        yield running


def requests_of(kind: str) -> list[pb.GenerateRequest]:
    rng = random.Random(kind)
    made = []
    for number in range(NUM_REQUESTS):
        request = pb.GenerateRequest(stop=pb.Stop(max_tokens=40, ignore_eos=True))
        if number % 3:
            request.token_ids.ids.extend(rng.randrange(60, 512) for _ in range(30 + number))
        else:
            buffer = io.BytesIO()
            Image.frombytes("RGB", (48, 48), rng.randbytes(3 * 48 * 48)).save(buffer, "PNG")
            request.prompt = f"<image>What is number {number}?"
            request.images.add(data=buffer.getvalue())
        request.sampling.temperature = 0.9 if kind == "seeded" else 0
        request.sampling.seed = number
        if kind == "logprobs":
            request.output.logprobs = 2
        if kind == "prompt logprobs":
            request.output.prompt_logprobs = 3
        made.append(request)
    return made


@pytest.mark.parametrize("kind", ["greedy", "seeded", "logprobs", "prompt logprobs"])
def test_preempted_requests_miss_and_repeat_nothing(server: LocalServer, kind: str) -> None:
    requests = requests_of(kind)

    def ask(request: pb.GenerateRequest) -> Answer:
        return Answer(list(server.inference.Generate(request, timeout=120)))

    alone = [ask(request) for request in requests]
    before = server.gauges().num_preemptions
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        together = list(pool.map(ask, requests))
    assert server.gauges().num_preemptions > before
    assert sum(answer.finished.timings.preemptions for answer in together) > 0
    for one, other in zip(together, alone, strict=True):
        assert one.token_ids == other.token_ids
        assert one.text == other.text
        assert one.kinds.count("accepted") == 1
        assert one.finished.usage.completion_tokens == len(one.token_ids) == 40
        assert one.finished.usage.prompt_tokens == other.finished.usage.prompt_tokens
        assert [record.token_id for record in one.logprobs] == (one.token_ids if kind == "logprobs" else [])
        for record, reference in zip(one.logprobs, other.logprobs, strict=True):
            assert record.logprob == pytest.approx(reference.logprob, abs=1e-5)
            assert [top.token_id for top in record.top] == [top.token_id for top in reference.top]
        scored = one.finished.usage.prompt_tokens - 1 if kind == "prompt logprobs" else 0
        assert len(one.prompt_logprobs) == len(other.prompt_logprobs) == scored
        for record, reference in zip(one.prompt_logprobs, other.prompt_logprobs, strict=True):
            assert record.token_id == reference.token_id
            assert record.logprob == pytest.approx(reference.logprob, abs=1e-5)
        if one.finished.timings.preemptions:
            assert one.finished.timings.preempted_s > 0
