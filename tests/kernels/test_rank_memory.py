"""Operators through the ranks' memory, with threads for ranks; `tests/workers/test_exchange.py` has processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import reduce
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from airside.workers import ops

T = TypeVar("T")

SLOT_BYTES = 256 * 1024
"""Longer tensors go in pieces (rank_memory.h)."""

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the system has no anonymous files")


@contextmanager
def handles(num_ranks: int, patience_s: float = 60.0) -> Iterator[list[int]]:
    """One per rank, all in this process."""
    fd = os.memfd_create("ranks")
    try:
        os.ftruncate(fd, ops.rank_memory_bytes(num_ranks))
        pid = os.getpid()
        processes = torch.tensor([[pid, ops.process_start_time(pid)]] * num_ranks)
        opened = [ops.open_rank_memory(fd, rank, processes, patience_s) for rank in range(num_ranks)]
    finally:
        os.close(fd)
    try:
        yield opened
    finally:
        for handle in opened:
            ops.close_rank_memory(handle)


def on_all(opened: list[int], act: Callable[[int, int], T]) -> list[T]:
    """What `act(rank, handle)` returned on each, called side by side."""
    with ThreadPoolExecutor(len(opened)) as pool:
        return list(pool.map(act, range(len(opened)), opened))


def sum_in_order(parts: list[Tensor]) -> Tensor:
    return reduce(torch.add, [part.float() for part in parts]).to(parts[0].dtype)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_sums_are_those_in_the_order_of_the_ranks_on_every_rank(dtype: torch.dtype, num_ranks: int) -> None:
    """Shapes of less than a vector, of a share of each rank, of several pieces, and odd ones."""
    slot = SLOT_BYTES // dtype.itemsize
    shapes = [(1, 1), (1, 576), (3, 7), (5, 333), (64, 576), (1, slot), (1, slot + 1), (7, slot // 3 + 5), (0, 8)]
    with handles(num_ranks) as opened:
        for shape in shapes:
            parts = [torch.randn(shape).mul(10.0**rank).to(dtype) for rank in range(num_ranks)]
            expected = sum_in_order(parts)
            for total in on_all(opened, lambda rank, handle, parts=parts: ops.all_reduce_sum(parts[rank], handle)):
                assert torch.equal(total, expected), shape


def test_the_order_matters_and_the_sum_is_rounded_once() -> None:
    """In another order, or rounded between, the small parts would be lost or the large ones not cancel as they do."""
    values = [[2.0**24, 1.0], [1.0, 2.0**-9], [-(2.0**24), 2.0**-9]]
    parts = [torch.tensor([value]) for value in values]
    with handles(3) as opened:
        for total in on_all(opened, lambda rank, handle: ops.all_reduce_sum(parts[rank], handle)):
            assert total.tolist() == [[0.0, 1.0 + 2.0**-8]]
        halves = [torch.tensor([[value]], dtype=torch.bfloat16) for value in (1.0, 2.0**-8, 2.0**-8)]
        for total in on_all(opened, lambda rank, handle: ops.all_reduce_sum(halves[rank], handle)):
            assert total.item() == 1.0 + 2.0**-7


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_sum_may_replace_the_part(num_ranks: int) -> None:
    parts = [torch.randn(9, 30_001) for _ in range(num_ranks)]
    expected = sum_in_order(parts)
    with handles(num_ranks) as opened:
        on_all(opened, lambda rank, handle: ops.all_reduce_sum(parts[rank], handle, out=parts[rank]))
    assert all(torch.equal(part, expected) for part in parts)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_row_is_the_same_alone_and_in_a_batch(dtype: torch.dtype, num_ranks: int) -> None:
    parts = [torch.randn(200, 576).to(dtype) for _ in range(num_ranks)]

    def together_and_alone(rank: int, handle: int) -> tuple[Tensor, Tensor]:
        rows = [ops.all_reduce_sum(row[None], handle) for row in parts[rank]]
        return ops.all_reduce_sum(parts[rank], handle), torch.cat(rows)

    with handles(num_ranks) as opened:
        for together, alone in on_all(opened, together_and_alone):
            assert torch.equal(together, alone)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (2, SLOT_BYTES // 8), (3, SLOT_BYTES // 2 + 3), (0, 4)])
def test_rank_0_gets_the_columns_of_all(dtype: torch.dtype, num_ranks: int, shape: tuple[int, int]) -> None:
    parts = [torch.randn(shape).to(dtype) for _ in range(num_ranks)]
    with handles(num_ranks) as opened:
        first, *others = on_all(
            opened, lambda rank, handle: ops.gather_columns(parts[rank], handle, None if rank else num_ranks)
        )
    assert first is not None
    assert torch.equal(first, torch.cat(parts, dim=1))
    assert others == [None] * (num_ranks - 1)


@pytest.mark.parametrize("count", [0, 1, 33, SLOT_BYTES // 4 + 1])
def test_all_get_the_tokens_of_rank_0(count: int) -> None:
    tokens = [torch.arange(count, dtype=torch.int32) + rank for rank in range(3)]
    with handles(3) as opened:
        on_all(opened, lambda rank, handle: ops.broadcast(tokens[rank], handle))
    assert all(torch.equal(own, torch.arange(count, dtype=torch.int32)) for own in tokens)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_thousands_of_rounds_of_all_kinds_back_to_back(num_ranks: int) -> None:
    """Nobody reads what was overwritten, or what is not there yet."""
    rounds = 1500

    def play(rank: int, handle: int) -> None:
        x, tokens = torch.empty(1, 40), torch.empty(3, dtype=torch.int32)
        for i in range(rounds):
            total = ops.all_reduce_sum(x.fill_(i + rank), handle)
            assert (total == num_ranks * i + sum(range(num_ranks))).all()
            if i % 3 == 0:
                ops.broadcast(tokens.fill_(i if rank == 0 else -1), handle)
                assert (tokens == i).all()
            if i % 5 == 0:
                columns = ops.gather_columns(x.fill_(i + rank), handle, None if rank else num_ranks)
                assert columns is None or columns[0, ::40].tolist() == [float(i + peer) for peer in range(num_ranks)]

    with handles(num_ranks) as opened:
        on_all(opened, play)


def test_a_rank_that_does_not_come_is_named() -> None:
    with handles(3, patience_s=2.0) as opened:

        def act(rank: int, handle: int) -> str:
            if rank == 1:
                return ""
            with pytest.raises(RuntimeError, match=r"rank 1 has not answered rank \d for 2 s") as caught:
                ops.all_reduce_sum(torch.ones(1, 1), handle)
            return str(caught.value)

        assert all(on_all(opened, act)[::2])


def test_a_rank_that_has_left_is_named_without_delay() -> None:
    fd = os.memfd_create("ranks")
    os.ftruncate(fd, ops.rank_memory_bytes(2))
    pid = os.getpid()
    processes = torch.tensor([[pid, ops.process_start_time(pid)]] * 2)
    first, second = (ops.open_rank_memory(fd, rank, processes, 60.0) for rank in range(2))
    os.close(fd)
    ops.close_rank_memory(second)
    with pytest.raises(RuntimeError, match=r"rank 1 \(pid \d+\) has left the group"):
        ops.all_reduce_sum(torch.ones(1, 1), first)
    ops.close_rank_memory(first)


def test_a_process_has_a_start_time_while_it_runs() -> None:
    pid = os.getpid()
    assert ops.process_start_time(pid) > 0
    assert 0 < ops.process_start_time(os.getppid()) <= ops.process_start_time(pid)
    assert ops.process_start_time(2**30) == 0
    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert ops.process_start_time(child) == 0, "a zombie is no process that answers"
    os.waitpid(child, 0)


def test_tensors_that_do_not_fit_are_refused() -> None:
    with handles(1) as (handle,):
        with pytest.raises(ValueError, match="all_reduce_sum: x must"):
            ops.all_reduce_sum(torch.ones(2, 8)[:, ::2], handle)
        with pytest.raises(ValueError, match="all_reduce_sum: out must"):
            ops.all_reduce_sum(torch.ones(2, 8), handle, out=torch.ones(2, 7))
        with pytest.raises(ValueError, match="all_reduce_sum: x must be float32, bfloat16 or float16"):
            ops.all_reduce_sum(torch.ones(1, 2, dtype=torch.int64), handle)
        with pytest.raises(ValueError, match="gather_columns: rank 0 and no other"):
            ops.gather_columns(torch.ones(2, 8), handle, None)
        with pytest.raises(ValueError, match="broadcast: tokens must be int32"):
            ops.broadcast(torch.ones(2), handle)
    with pytest.raises(ValueError, match="the number of ranks"):
        ops.rank_memory_bytes(65)
    with pytest.raises(RuntimeError, match="cannot be mapped"):
        ops.open_rank_memory(-1, 0, torch.zeros(1, 2, dtype=torch.int64), 1.0)
