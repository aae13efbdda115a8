"""Memory that all ranks of one node have mapped, and how they come to it: `csrc/kernels/cpu/rank_memory.h` uses it.

Rank 0 makes an anonymous file (memfd_create(2)), and the others open it as a file descriptor of rank 0's process. It
never has a name in a folder, so nothing of it outlives the ranks, however they end, and the size of /dev/shm, which
containers keep small, is no limit.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Protocol

import torch

from airside.workers import ops


class Store(Protocol):
    """What is used here of torch.distributed's."""

    def set(self, key: str, value: str) -> None:
        """For all ranks to see."""

    def get(self, key: str) -> bytes:
        """Waits until some rank has set it. Raises RuntimeError when none does in time."""


@dataclass(frozen=True, slots=True)
class _Rank:
    """What a rank tells the others of itself when they meet."""

    pid: int
    start_time: int
    memory_fd: int | None = None  # on rank 0: the file that is offered; None: it cannot be had
    memory_name: str = ""  # no other file has this name, on whatever node it is looked for


def meet_in_memory(store: Store, rank: int, size: int, patience: timedelta) -> int | None:
    """A handle of the ranks' memory for `ops.all_reduce_sum` and its like; None, on all ranks, if one cannot map it.

    That is so when they are on several nodes, do not see one another's processes, or the system has no memory for it.

    Args:
        store: where all ranks look; it is not needed any more when this returns a handle.
        patience: with a rank that does not come, or later does not answer.
    Raises:
        RuntimeError: a rank has not come, or has gone.
    """
    own = _introduction(rank, size)
    handle = None
    try:
        ranks = [_Rank(**json.loads(text)) for text in _told(store, "rank", rank, size, json.dumps(asdict(own)))]
        handle = _open(ranks, rank, patience)
        answers = _told(store, "memory", rank, size, "none" if handle is None else "mapped")
    finally:
        if own.memory_fd is not None:
            os.close(own.memory_fd)
    if handle is None:
        return None
    if set(answers) != {"mapped"}:
        ops.close_rank_memory(handle)
        return None
    ops.all_reduce_sum(torch.zeros(1, 1), handle)  # all have read the store, which may end with rank 0's process
    return handle


def _introduction(rank: int, size: int) -> _Rank:
    pid = os.getpid()
    start_time = ops.process_start_time(pid)
    if rank != 0 or not start_time or not hasattr(os, "memfd_create"):
        return _Rank(pid, start_time)
    name = f"airside-{secrets.token_hex(16)}"
    fd = os.memfd_create(name)
    try:
        os.posix_fallocate(fd, 0, ops.rank_memory_bytes(size))  # else a full system is a SIGBUS at the first use
    except OSError:
        os.close(fd)
        return _Rank(pid, start_time)
    return _Rank(pid, start_time, fd, f"/memfd:{name} (deleted)")


def _told(store: Store, what: str, rank: int, size: int, own: str) -> list[str]:
    """What all ranks say, in order."""
    store.set(f"{what}-{rank}", own)
    said = []
    for peer in range(size):
        try:
            said.append(store.get(f"{what}-{peer}").decode())
        except RuntimeError as error:
            raise RuntimeError(f"rank {peer} has not come to where the ranks meet: {error}") from error
    return said


def _open(ranks: Sequence[_Rank], rank: int, patience: timedelta) -> int | None:
    offer = ranks[0]
    if offer.memory_fd is None or any(ops.process_start_time(peer.pid) != peer.start_time for peer in ranks):
        return None
    path = f"/proc/{offer.pid}/fd/{offer.memory_fd}"
    try:
        if os.readlink(path) != offer.memory_name:
            return None
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        processes = torch.tensor([[peer.pid, peer.start_time] for peer in ranks])
        return ops.open_rank_memory(fd, rank, processes, patience.total_seconds())
    except RuntimeError:  # it cannot be mapped
        return None
    finally:
        os.close(fd)
