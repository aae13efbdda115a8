"""Ranks in processes of their own that exchange tensors, and what they see of one that is lost."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import reduce
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from airside.workers import ops
from airside.workers.exchange import meet
from airside.workers.parallel import RankGroup

CPU = torch.device("cpu")
PATIENCE_S = 60.0
ROUNDS = 2000
SHAPES = [(1, 576), (3, 7), (64, 576), (301, 1531)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

Act = Callable[[RankGroup, Any], object]  # Any: what the test gives it

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the system has no anonymous files")


@pytest.fixture(scope="module", autouse=True)
def _no_server_left() -> Iterator[None]:
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # it would wait for the end of all tests


def run_rank(
    rank: int, size: int, rendezvous: str, patience_s: float, act: Act, given: object, answer: Connection
) -> None:
    """The life of one: sends what `act` returned, or the error that ended it."""
    torch.set_num_threads(1)
    if given == "sees nobody" and rank == 1:
        ops.process_start_time = lambda _: 0  # as in a process namespace of its own
    try:
        exchange = meet(rank, size, rendezvous, CPU, timedelta(seconds=patience_s))
        group = RankGroup(rank, size, exchange)
        answer.send(act(group, given))
        group.close()
    except RuntimeError as error:
        answer.send(error)


class Ranks:
    """The processes, and where each answers."""

    def __init__(self, processes: list[ForkServerProcess], answers: list[Connection]) -> None:
        self.processes = processes
        self._answers = answers

    def answer(self, rank: int) -> Any:  # Any: what the test's act returned
        assert self._answers[rank].poll(2 * PATIENCE_S), f"rank {rank} does not answer"
        return self._answers[rank].recv()


@contextmanager
def ranks(
    size: int, rendezvous: str, act: Act, given: object = None, *, patience_s: float = PATIENCE_S
) -> Iterator[Ranks]:
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["airside.workers.parallel"])  # torch takes a second in each process that is spawned
    processes, answers = [], []
    for rank in range(size):
        answer, ours = server.Pipe(duplex=False)
        process = server.Process(target=run_rank, args=(rank, size, rendezvous, patience_s, act, given, ours))
        process.start()
        ours.close()
        processes.append(process)
        answers.append(answer)
    try:
        yield Ranks(processes, answers)
    finally:
        for process in processes:
            process.kill()
            process.join()


def part_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).mul(10.0**rank).to(dtype)


def sums_and_shares(group: RankGroup, _: object) -> dict[str, Any]:
    """All that a group does, and many sums back to back."""
    parts = [part_of(group.rank, shape, dtype) for shape in SHAPES for dtype in DTYPES]
    own = np.arange(5, dtype=np.int32) if group.rank == 0 else None
    made = {
        "sums": [group.sum(part).float().numpy() for part in parts],
        "strided": group.sum(part_of(group.rank, (8, 12), torch.float32)[:, ::3]).numpy(),
        "columns": [None if (all_ := group.gather_columns(part)) is None else all_.float().numpy() for part in parts],
        "tokens": group.share_tokens(own, 5, CPU),
    }
    x = torch.empty(1, 64)
    made["rounds"] = sum(
        bool((group.sum(x.fill_(i + group.rank)) == group.size * i + sum(range(group.size))).all())
        for i in range(ROUNDS if group.memory is not None else 10)
    )
    made["shares memory"] = group.memory is not None
    made["has gloo"] = dist.is_initialized()
    made["named segments"] = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line]
    return made


def check_what_they_made(made: list[dict[str, Any]]) -> None:
    size = len(made)
    shapes = [(shape, dtype) for shape in SHAPES for dtype in DTYPES]
    for index, (shape, dtype) in enumerate(shapes):
        parts = [part_of(rank, shape, dtype) for rank in range(size)]
        total = reduce(torch.add, [part.float() for part in parts]).to(dtype)
        for own in made:
            np.testing.assert_array_equal(own["sums"][index], total.float().numpy())
        np.testing.assert_array_equal(made[0]["columns"][index], torch.cat(parts, dim=1).float().numpy())
        assert all(own["columns"][index] is None for own in made[1:])
    strided = reduce(torch.add, [part_of(rank, (8, 12), torch.float32)[:, ::3] for rank in range(size)])
    for own in made:
        np.testing.assert_array_equal(own["strided"], strided.numpy())
        assert own["tokens"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_of_one_node_share_memory_without_a_name(size: int, tmp_path: Path) -> None:
    with ranks(size, f"file://{tmp_path}/rendezvous", sums_and_shares) as started:
        made = [started.answer(rank) for rank in range(size)]
        check_what_they_made(made)
        for own in made:
            assert (own["shares memory"], own["has gloo"], own["rounds"]) == (True, False, ROUNDS)
            assert not own["named segments"]
        for process in started.processes:
            process.join(PATIENCE_S)
            assert process.exitcode == 0
    assert not list(tmp_path.iterdir()), "where they met is left"


def test_they_may_meet_over_tcp() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ranks(2, f"tcp://127.0.0.1:{port}", sums_and_shares) as started:
        made = [started.answer(rank) for rank in range(2)]
    check_what_they_made(made)
    assert [own["shares memory"] for own in made] == [True, True]


def test_all_use_gloo_when_one_cannot_share_memory(tmp_path: Path) -> None:
    with ranks(2, f"file://{tmp_path}/rendezvous", sums_and_shares, "sees nobody") as started:
        made = [started.answer(rank) for rank in range(2)]
    check_what_they_made(made)
    assert [(own["shares memory"], own["has gloo"]) for own in made] == [(False, True)] * 2


def sum_until_one_falls(group: RankGroup, how: signal.Signals) -> object:
    """Rank 1 sends itself a signal in the middle; what the others get."""
    for i in range(1000):
        if group.rank == 1 and i == 500:
            os.kill(os.getpid(), how)
        group.sum(torch.ones(1, 8))
    return "nothing happened"


def test_a_killed_rank_ends_the_waiting_of_all_others(tmp_path: Path) -> None:
    """Long before they lose their patience."""
    rendezvous = f"file://{tmp_path}/rendezvous"
    with ranks(3, rendezvous, sum_until_one_falls, signal.SIGKILL, patience_s=10 * PATIENCE_S) as started:
        for rank in (0, 2):
            # The first to notice ends too, and may be what the other one misses first.
            lost = rf"rank (1 \(pid {started.processes[1].pid}\) is gone|[02] \(pid \d+\) (is gone|has left the group))"
            with pytest.raises(RuntimeError, match=lost):
                raise started.answer(rank)


def test_a_rank_that_hangs_is_waited_for_no_longer_than_agreed(tmp_path: Path) -> None:
    with ranks(2, f"file://{tmp_path}/rendezvous", sum_until_one_falls, signal.SIGSTOP, patience_s=15.0) as started:
        with pytest.raises(RuntimeError, match="rank 1 has not answered rank 0 for 15 s"):
            raise started.answer(0)
        assert started.processes[1].is_alive()


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    def open_files() -> int:
        gc.collect()  # what earlier failures hold on to
        return len(list(Path("/proc/self/fd").iterdir()))

    before = open_files()
    with pytest.raises(RuntimeError, match="rank 1 has not come to where the ranks meet"):
        meet(0, 2, f"file://{tmp_path}/rendezvous", CPU, timedelta(seconds=0.3))
    assert open_files() <= before
