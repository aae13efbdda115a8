"""Full to the brim on the way of pictures: who comes too late is told so, whoever waits gets its turn."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from airside.proto import airside_pb2 as pb
from tests.checkpoints import TILE_PIXELS, make_idefics3
from tests.gateway.client import failure
from tests.real_processes import wait_until
from tests.system.local_server import Answer, LocalServer
from tests.system.picture_requests import PATIENCE_S, answer, in_new_file, picture, request

pytestmark = pytest.mark.slow

SLAB_BYTES = 5 * TILE_PIXELS**2 * (3 * 4 + 1)  # of two by two tiles and the whole picture: float32, and a mask
HEADER_BYTES = 4096
FILE = picture(500, 500)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_idefics3(tmp_path_factory.mktemp("idefics3"))


def ask_about(number: int, max_tokens: int = 4) -> pb.GenerateRequest:
    """The same picture for all numbers, in files of the same size."""
    return request("<image>What is it?", in_new_file(FILE, 1000 + number), max_tokens=max_tokens)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process does nothing meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_files_beyond_what_may_wait_are_refused_for_now(checkpoint: Path) -> None:
    file_bytes = len(in_new_file(FILE, 1000))
    vision = {"limits": {"max_waiting_bytes": 2 * file_bytes + 100}}
    with LocalServer(checkpoint, vision=vision, cluster={"silence_timeout_s": 60.0}) as server:
        quiet = answer(server, ask_about(0)).token_ids
        with stopped(server.processes.pid("vision-0")):
            waiting = [server.inference.Generate(ask_about(number), timeout=PATIENCE_S) for number in (1, 2)]
            assert all(next(call).HasField("accepted") for call in waiting)
            assert server.gauges().image_bytes_waiting == 2 * file_bytes
            refused = failure(server.inference.Generate(ask_about(3), timeout=PATIENCE_S))
            assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert refused.retry_after_s is not None
            assert "vision.limits.max_waiting_bytes" in refused.message
            assert str(file_bytes) in refused.message
            assert len(answer(server, request("No picture")).token_ids) == 4
            waiting[0].cancel()
            wait_until(lambda: server.gauges().image_bytes_waiting == file_bytes, PATIENCE_S, "there is room again")
            waiting[0] = server.inference.Generate(ask_about(3), timeout=PATIENCE_S)
            assert next(waiting[0]).HasField("accepted")
        assert [Answer(list(call)).token_ids for call in waiting] == [quiet, quiet]
        assert answer(server, ask_about(4)).token_ids == quiet
        wait_until(server.is_at_rest, PATIENCE_S, "everything given back")


def test_each_gets_its_turn_in_arenas_with_room_for_one(checkpoint: Path) -> None:
    """Two vision workers. The large one needs a whole arena, and small ones that fit beside one another keep coming."""
    arena = HEADER_BYTES + SLAB_BYTES + 64
    vision = {"arena": arena, "cache": {"pixels": 1}, "autoscaling_config": {"min_replicas": 2}}
    small = picture(60, 60)
    with LocalServer(checkpoint, vision=vision, engine={"max_num_seqs": 16}) as server:
        quiet = answer(server, ask_about(0, max_tokens=20)).token_ids
        quiet_small = answer(server, request("<image>Small", small, max_tokens=20)).token_ids
        is_over = threading.Event()

        def keep_asking(client: int) -> int:
            count = 0
            while not is_over.is_set():
                count += 1
                file = in_new_file(small, 1000 * client + count)
                assert answer(server, request("<image>Small", file, max_tokens=20)).token_ids == quiet_small
            return count

        with ThreadPoolExecutor(14) as pool:
            others = [pool.submit(keep_asking, client) for client in range(1, 7)]
            try:
                large = pool.map(lambda number: answer(server, ask_about(number, max_tokens=20)), range(1, 41))
                assert all(one.token_ids == quiet for one in large)
            finally:
                is_over.set()
            assert all(other.result() for other in others)
        wait_until(server.is_at_rest, PATIENCE_S, "everything given back")
        wait_until(lambda: server.shared_memory() <= 2 * HEADER_BYTES + SLAB_BYTES, 2.0, "memory goes back soon")


def test_a_reader_that_stops_holds_nobody_up(checkpoint: Path) -> None:
    """As many as run at once, and more. What they did not read is kept for them; their pictures and blocks are not."""
    with LocalServer(checkpoint, vision={"arena": "4MiB"}, engine={"max_num_seqs": 4}) as server:
        quiet = answer(server, ask_about(0, max_tokens=300)).token_ids
        unread = [server.inference.Generate(ask_about(number, 300), timeout=PATIENCE_S) for number in range(1, 11)]
        assert answer(server, ask_about(20, max_tokens=300)).token_ids == quiet
        all_ends = 2 + len(unread)
        wait_until(lambda: server.gauges().requests_finished["length"] == all_ends, PATIENCE_S, "all are done")
        wait_until(server.is_at_rest, PATIENCE_S, "everything given back")
        assert all(Answer(list(call)).token_ids == quiet for call in unread)
