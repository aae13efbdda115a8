"""How the ranks of a group exchange tensors: through memory that they share, or through torch.distributed."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.rendezvous import rendezvous as find_store

from airside.workers import ops
from airside.workers.rank_memory import meet_in_memory

log = logging.getLogger(__name__)

PEER_TIMEOUT = timedelta(seconds=60)
"""For a rank that hangs; one that dies is noticed at once."""


class Exchange(Protocol):
    """What ranks do together: all of them call the same methods in the same order. `RankGroup` says what each does."""

    def sum(self, partial: Tensor) -> Tensor:
        """[num_rows, columns] -> the sum, in float32 and in the order of the ranks, rounded once."""

    def gather_columns(self, part: Tensor) -> Tensor | None:
        """[num_rows, columns / size] -> [num_rows, columns] on rank 0, None elsewhere."""

    def share_tokens(
        self, tokens: NDArray[np.int32] | None, count: int, device: torch.device
    ) -> NDArray[np.int32] | None:
        """[count] on rank 0 -> [count] everywhere."""

    def close(self) -> None:
        """Who waits for this rank afterwards fails."""


def meet(rank: int, size: int, rendezvous: str, device: torch.device, patience: timedelta = PEER_TIMEOUT) -> Exchange:
    """Meets the other ranks; returns when all are there, with the fastest means that all of them have.

    Args:
        rendezvous: a torch.distributed init_method.
    Raises:
        RuntimeError: they have not all come in time.
    """
    if device.type == "cuda":
        dist.init_process_group("nccl", init_method=rendezvous, rank=rank, world_size=size, timeout=patience)
        return DistributedExchange(rank, size)
    store, _, _ = next(find_store(rendezvous, rank, size, timeout=patience))
    store.set_timeout(patience)
    handle = meet_in_memory(store, rank, size, patience)
    log.info("met rank=%d of=%d through=%s", rank, size, "gloo" if handle is None else "shared memory")
    if handle is not None:
        return MemoryExchange(rank, size, handle)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=patience)
    return DistributedExchange(rank, size)


class MemoryExchange:
    """An `Exchange` of ranks on one node, on CPUs.

    A rank that dies is noticed by those that wait for it within some 20 ms, and RuntimeError names it.

    Args:
        handle: of the ranks' memory, from `meet_in_memory`; closed with this.
    """

    def __init__(self, rank: int, size: int, handle: int) -> None:
        self._rank = rank
        self._size = size
        self.handle = handle

    def sum(self, partial: Tensor) -> Tensor:
        """As `Exchange` says."""
        return ops.all_reduce_sum(partial.contiguous(), self.handle)

    def gather_columns(self, part: Tensor) -> Tensor | None:
        """As `Exchange` says."""
        return ops.gather_columns(part.contiguous(), self.handle, self._size if self._rank == 0 else None)

    def share_tokens(
        self, tokens: NDArray[np.int32] | None, count: int, device: torch.device
    ) -> NDArray[np.int32] | None:
        """As `Exchange` says."""
        assert device.type == "cpu"
        shared = np.empty(count, np.int32) if tokens is None else np.ascontiguousarray(tokens)
        ops.broadcast(torch.from_numpy(shared), self.handle)
        return shared

    def close(self) -> None:
        """As `Exchange` says. Nothing else can be called afterwards."""
        ops.close_rank_memory(self.handle)


class DistributedExchange:
    """An `Exchange` through torch.distributed's default process group, which the caller has made."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    def sum(self, partial: Tensor) -> Tensor:
        """As `Exchange` says; a ring all-reduce would start each element's sum at another rank."""
        num_rows, columns = partial.shape
        gathered = torch.empty((self._size * num_rows, columns), dtype=torch.float32, device=partial.device)
        dist.all_gather_into_tensor(gathered, partial.float())
        total, *others = gathered.chunk(self._size)
        for part in others:
            total += part
        return total.to(partial.dtype)

    def gather_columns(self, part: Tensor) -> Tensor | None:
        """As `Exchange` says."""
        parts = [torch.empty_like(part) for _ in range(self._size)] if self._rank == 0 else None
        dist.gather(part.contiguous(), parts, dst=0)
        return torch.cat(parts, dim=1) if parts is not None else None

    def share_tokens(
        self, tokens: NDArray[np.int32] | None, count: int, device: torch.device
    ) -> NDArray[np.int32] | None:
        """As `Exchange` says."""
        shared = torch.empty(count, dtype=torch.int32, device=device) if tokens is None else torch.from_numpy(tokens)
        shared = shared.to(device)
        dist.broadcast(shared, src=0)
        own: NDArray[np.int32] = shared.cpu().numpy()
        return own

    def close(self) -> None:
        """As `Exchange` says."""
        dist.destroy_process_group()
