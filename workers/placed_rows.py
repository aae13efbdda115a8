"""Where the keys and values of some rows' tokens live."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Int = TypeVar("Int", bound=np.signedinteger)


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """Tokens, row after row: of each row consecutive positions of a sequence, in the blocks of its table."""

    positions: Tensor  # [num_tokens] int32: of the rotary embedding; [3, num_tokens] where axes differ (`rope_axes`)
    slots: Tensor  # [num_tokens] int64, block_id * block_size + offset
    block_tables: Tensor  # [num_rows, max_blocks] int32; what is behind a row's own blocks is not read
    query_starts: Tensor  # [num_rows + 1] int32: row i is tokens [query_starts[i], query_starts[i + 1])
    context_lens: Tensor  # [num_rows] int32: tokens of the sequence up to and with the row's last
    attend_to: Tensor | None = field(default=None, kw_only=True)  # as in ops.paged_attention; None: causal


def place_rows(
    starts: NDArray[np.int32], ends: NDArray[np.int32], tables: NDArray[np.int32], block_size: int, device: torch.device
) -> PlacedRows:
    """Row i is positions `[starts[i], ends[i])`, of which there is at least one, in the blocks of `tables[i]`."""
    lengths = ends - starts
    query_starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=query_starts[1:])
    positions = spans(starts, ends)
    block_of_position, offsets = np.divmod(positions, np.int32(block_size))
    blocks = tables[np.repeat(np.arange(len(lengths)), lengths), block_of_position]

    def tensor(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return PlacedRows(
        positions=tensor(positions),
        slots=tensor(blocks * np.int64(block_size) + offsets),
        block_tables=tensor(tables),
        query_starts=tensor(query_starts),
        context_lens=tensor(ends),
    )


def spans(starts: NDArray[Int], ends: NDArray[Int]) -> NDArray[Int]:
    """[sum(ends - starts)]: `starts[i], ..., ends[i] - 1` of each i in turn."""
    lengths = ends - starts
    offsets = starts - (np.cumsum(lengths, dtype=starts.dtype) - lengths)
    flat: NDArray[Int] = np.arange(lengths.sum(), dtype=starts.dtype) + np.repeat(offsets, lengths)
    return flat
