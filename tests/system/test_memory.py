"""Resident memory of every process over thousands of requests of all kinds: it comes to rest."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import grpc
import psutil
import pytest

from tests.checkpoints import make_idefics3
from tests.real_processes import wait_until
from tests.system.local_server import LocalServer
from tests.system.mixed_requests import mixed_request

pytestmark = pytest.mark.slow

ROUND = 700
GROWTH_MAX = {"controller": 6, "gateway-0": 12, "vision-0": 12, "worker-0": 60}  # MiB, over the last two rounds


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    model = make_idefics3(tmp_path_factory.mktemp("idefics3"))
    engine = {"num_threads": 1, "max_num_seqs": 32, "drafts": {"method": "ngram"}}
    with LocalServer(model, kv_blocks=200, engine=engine) as running:
        yield running


def use(server: LocalServer, seed: int) -> None:
    """One request: read to its end, given up after a few events, or with a deadline that it may not make."""
    rng = random.Random(seed)
    call = server.inference.Generate(mixed_request(seed, takes_images=True), timeout=rng.choice([60, 60, 60, 60, 0.05]))
    try:
        for _ in islice(call, rng.choice([1000, 1000, 1000, rng.randrange(4)])):
            pass
    except grpc.RpcError as error:
        assert error.code() in (  # noqa: PT017 - nothing is wrong with an end without a status
            grpc.StatusCode.DEADLINE_EXCEEDED,
            grpc.StatusCode.FAILED_PRECONDITION,
        )
    call.cancel()


def memory(server: LocalServer) -> dict[str, int]:
    """MiB by process."""
    return {name: psutil.Process(server.processes.pid(name)).memory_info().rss >> 20 for name in GROWTH_MAX}


def descriptors(server: LocalServer) -> dict[str, int]:
    return {name: psutil.Process(server.processes.pid(name)).num_fds() for name in GROWTH_MAX}


def test_two_thousand_requests_leave_nothing(server: LocalServer) -> None:
    used, opened = [], []
    with ThreadPoolExecutor(16) as pool:
        for begin in range(0, 3 * ROUND, ROUND):
            list(pool.map(lambda seed: use(server, seed), range(begin, begin + ROUND)))
            wait_until(lambda: server.gauges().num_requests_running == 0, 10, "the abandoned ones are gone")
            used.append(memory(server))
            opened.append(descriptors(server))
    for name, limit in GROWTH_MAX.items():
        assert used[-1][name] - used[0][name] <= limit, used
        assert opened[-1][name] - opened[0][name] <= 2, opened
    gauges = server.gauges()
    assert gauges.kv_blocks_live == gauges.num_requests_waiting == gauges.vision_queue_depth == 0
    assert not server.processes.exited()
