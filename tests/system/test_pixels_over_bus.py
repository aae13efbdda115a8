"""Vision workers that share no memory with the ranks: their pixels travel over the bus, and all else is as with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from signal import SIGKILL, SIGSTOP
from typing import Any

import pytest

from airside.proto import airside_pb2 as pb
from tests.checkpoints import QWEN_MARK, make_idefics3, make_qwen2_5_vl
from tests.real_processes import wait_until
from tests.system.given_up import assert_nothing_grows
from tests.system.local_server import LocalServer
from tests.system.picture_requests import PATIENCE_S, answer, in_new_file, picture, request
from tests.system.test_picture_budget import SQUARE_TILES, WIDE_TILES, slab_bytes
from tests.system.test_picture_workers_lost import killing

pytestmark = pytest.mark.slow

MANY = 12
LONG_TOKENS = 700
ROUND = 600  # requests; the first thousand fill caches and pools of threads, whichever way pixels go
# MiB over the last round, whose pixels are 39 MB. A rank's heap grows for thousands of requests, either way.
GROWTH_MAX = {"controller": 6, "vision-0": 6, "vision-1": 6, "worker-0": 20}


def segments_of(server: LocalServer) -> list[Path]:
    return list(Path("/dev/shm").glob(f"{server.plan.run.segment_prefix}*"))


@contextmanager
def over_bus(model: Path, arena: int | str, vision: dict[str, Any], **config: Any) -> Iterator[LocalServer]:
    """No vision worker of it makes a segment."""
    with LocalServer(model, vision={"arena": arena, "shared_memory": "off", **vision}, **config) as server:
        yield server
        assert server.shared_memory() == 0
        assert not segments_of(server)


@pytest.fixture(scope="module")
def idefics3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_idefics3(tmp_path_factory.mktemp("idefics3"))


@pytest.fixture(scope="module")
def server(idefics3: Path) -> Iterator[LocalServer]:
    cache = {"pixels": "2MiB", "embeddings": "256KiB"}  # full after a few pictures
    engine = {"num_threads": 1, "max_num_seqs": 8}
    with over_bus(
        idefics3, "16MiB", {"autoscaling_config": {"min_replicas": 2}, "cache": cache}, kv_blocks=400, engine=engine
    ) as running:
        yield running


@pytest.mark.parametrize(
    ("make", "mark", "room"),
    [
        (make_idefics3, "<image>", slab_bytes(SQUARE_TILES) + slab_bytes(WIDE_TILES) // 2),
        (make_qwen2_5_vl, QWEN_MARK, 150_000),
    ],
    ids=["idefics3", "qwen2_5_vl"],
)
def test_answers_are_those_of_shared_memory(make: Callable[[Path], Path], mark: str, room: int, tmp_path: Path) -> None:
    """On two ranks, of pictures that are made one after the other: each takes more than half of the room there is."""
    model = make(tmp_path / "model")
    large = [request(f"{turn} {mark} What is it?", picture(300, 300, turn)) for turn in range(0, 10 * MANY, 10)]
    two = [request(f"{mark} and {mark}?", picture(64, 24, turn), picture(24, 64, turn)) for turn in (5, 15)]
    same = [request(f"{mark} or {mark}?", picture(300, 300, turn), picture(300, 300, turn)) for turn in (0, 45)]
    asked = [*large, *two, *same, request("No picture")]
    with LocalServer(model) as shared:
        expected = [answer(shared, one).token_ids for one in asked]
        assert segments_of(shared)
    assert len({tuple(tokens) for tokens in expected}) > len(asked) // 2, "hardly told apart"
    with over_bus(model, room, {}, engine={"tensor_parallel_size": 2}) as sent:
        assert [answer(sent, one).token_ids for one in asked] == expected
        again = [request(one.prompt, *(in_new_file(image.data, 1) for image in one.images)) for one in large]
        with ThreadPoolExecutor(MANY) as pool:
            answers = list(pool.map(lambda one: answer(sent, one).token_ids, again))
        assert answers == expected[: len(large)]
        wait_until(sent.is_at_rest, PATIENCE_S, "everything given back")


class Stream:
    """A request of which the first token has come."""

    def __init__(self, server: LocalServer, asked: pb.GenerateRequest) -> None:
        self._events = iter(server.inference.Generate(asked, timeout=PATIENCE_S))
        self._tokens: list[int] = []
        while not self._tokens:
            self._tokens += next(self._events).delta.token_ids

    def token_ids(self) -> list[int]:
        """All of them, at its end."""
        for event in self._events:
            self._tokens += event.delta.token_ids
        return self._tokens


def test_pixels_outlive_their_vision_worker_and_are_sent_to_new_ranks(idefics3: Path) -> None:
    file = picture(96, 64, 30)
    asked = [request(f"<image>{number} What is it?", in_new_file(file, number), max_tokens=4) for number in range(6)]
    long = request("<image>What is it?", file, max_tokens=LONG_TOKENS)
    with over_bus(idefics3, "1MiB", {}) as server, killing(server) as kill, ThreadPoolExecutor() as pool:
        expected = answer(server, long).token_ids
        others = [answer(server, one).token_ids for one in asked]
        stream = Stream(server, long)
        os.kill(server.processes.pid("worker-0"), SIGSTOP)  # so that it is not over before that rank is killed
        kill("vision-0")
        waiting = [
            pool.submit(lambda one: answer(server, one).token_ids, request(one.prompt, in_new_file(file, 90 + number)))
            for number, one in enumerate(asked)
        ]
        assert server.gauges().num_requests_running > 0
        server.replace_ranks(2, SIGKILL)
        assert stream.token_ids() == expected  # no vision worker is there
        assert server.gauges().recomputed_tokens > 0
        assert not any(future.done() for future in waiting)
        server.start_vision_worker(1)
        assert [future.result() for future in waiting] == others
        wait_until(server.is_at_rest, PATIENCE_S, "everything given back")
        assert "PixelsUnreadable" not in server.processes.log("controller")


def test_everything_is_as_it_was_before(server: LocalServer) -> None:
    """After requests of which a fifth are given up at random moments."""

    def check_at_rest() -> None:
        assert not segments_of(server)

    assert_nothing_grows(server, ROUND, GROWTH_MAX, check_at_rest)
