"""Tensor parallelism: the group of ranks, and the layers that are split over it (Shoeybi et al. 2019, 1909.08053)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from airside.workers.exchange import Exchange, MemoryExchange, meet
from airside.workers.weights.weight_source import MatrixPart, WeightSource


class RankGroup:
    """This process's place among the ranks, and how they exchange tensors. Alone, it exchanges nothing.

    Args:
        exchange: None: it is alone, or only asked for its shards.
    """

    def __init__(self, rank: int, size: int, exchange: Exchange | None = None) -> None:
        assert 0 <= rank < size
        self.rank = rank
        self.size = size
        self._exchange = exchange

    @staticmethod
    def connect(rank: int, size: int, rendezvous: str, device: torch.device) -> RankGroup:
        """Meets the other ranks at `rendezvous`; returns when all are there. Raises when they are not in time."""
        return RankGroup(rank, size, meet(rank, size, rendezvous, device) if size > 1 else None)

    @property
    def memory(self) -> int | None:
        """The handle for `ops.all_reduce_sum` and its like; None: the ranks share no memory, or there is but one."""
        return self._exchange.handle if isinstance(self._exchange, MemoryExchange) else None

    def shard(self, total: int) -> slice:
        """This rank's part of an axis of `total` entries."""
        assert total % self.size == 0
        part = total // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def sum(self, partial: Tensor) -> Tensor:
        """The sum over all ranks, on every rank, in float32 and in the order of the ranks, rounded once.

        Args:
            partial: [num_rows, columns].
        """
        return partial if self.size == 1 else self._others.sum(partial)

    def gather_columns(self, part: Tensor) -> Tensor | None:
        """On rank 0, the ranks' parts side by side; on others None.

        Args:
            part: [num_rows, columns / size].
        """
        return part if self.size == 1 else self._others.gather_columns(part)

    def share_tokens(
        self, tokens: NDArray[np.int32] | None, count: int, device: torch.device
    ) -> NDArray[np.int32] | None:
        """What rank 0 holds, on every rank.

        Args:
            tokens: [count] on rank 0, None on the others.
            device: this rank's.
        """
        return tokens if self.size == 1 else self._others.share_tokens(tokens, count, device)

    def close(self) -> None:
        """Leaves the group."""
        if self._exchange is not None:
            self._exchange.close()

    @property
    def _others(self) -> Exchange:
        assert self._exchange is not None, "the group was not connected"
        return self._exchange


class ColumnParallelLinear:
    """Several projections of one input as one product; each rank has its rows of each, so its part of every output.

    Args:
        names: tensors without their suffix `.weight`; all of `in_features` columns.
        out_features: rows of each.
    """

    def __init__(
        self,
        weights: WeightSource,
        names: tuple[str, ...],
        out_features: tuple[int, ...],
        in_features: int,
        group: RankGroup,
        *,
        bias: bool,
    ) -> None:
        own = [(name, rows, group.shard(rows)) for name, rows in zip(names, out_features, strict=True)]
        biases = [weights.read(f"{name}.bias", (rows,), shard) for name, rows, shard in own] if bias else []
        self._linear = weights.linear(
            [MatrixPart(f"{name}.weight", (rows, in_features), shard) for name, rows, shard in own],
            torch.cat(biases) if bias else None,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, sum(out_features) / size]."""
        return self._linear(x)


class RowParallelLinear:
    """A projection of an input that is split over the ranks; every rank gets the whole output."""

    def __init__(
        self, weights: WeightSource, name: str, out_features: int, in_features: int, group: RankGroup, *, bias: bool
    ) -> None:
        self._group = group
        own = MatrixPart(f"{name}.weight", (out_features, in_features), columns=group.shard(in_features))
        full_bias = weights.read(f"{name}.bias", (out_features,)) if bias else None
        # With more than one rank the bias must be added once, after the sum.
        self._linear = weights.linear([own], full_bias if group.size == 1 else None)
        self._bias = full_bias if group.size > 1 else None

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features / size] -> [num_tokens, out_features]."""
        out = self._group.sum(self._linear(x))
        return out if self._bias is None else out + self._bias
