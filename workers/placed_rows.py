"""Where the keys and values of some rows' tokens live."""

from __future__ import annotations

import functools
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


@dataclass(frozen=True, slots=True)
class HostRows:
    """The same as arrays on the host, of the same shapes; positions on one axis.

    Not to be written to: steps share some.
    """

    positions: NDArray[np.int32]
    slots: NDArray[np.int64]
    block_tables: NDArray[np.int32]
    query_starts: NDArray[np.int32]
    context_lens: NDArray[np.int32]


def place_rows(
    starts: NDArray[np.int32], ends: NDArray[np.int32], tables: NDArray[np.int32], block_size: int, device: torch.device
) -> PlacedRows:
    """The rows of `place_on_host` as tensors on the device."""
    placed = place_on_host(starts, ends, tables, block_size)
    return PlacedRows(
        positions=on_device(placed.positions, device),
        slots=on_device(placed.slots, device),
        block_tables=on_device(placed.block_tables, device),
        query_starts=on_device(placed.query_starts, device),
        context_lens=on_device(placed.context_lens, device),
    )


def place_on_host(
    starts: NDArray[np.int32], ends: NDArray[np.int32], tables: NDArray[np.int32], block_size: int
) -> HostRows:
    """Row i is positions `[starts[i], ends[i])`, of which there is at least one, in the blocks of `tables[i]`."""
    spread = spread_rows((ends - starts).tobytes())
    positions = starts[spread.row] + spread.offset
    block_of_position, offsets = np.divmod(positions, np.int32(block_size))
    slots = tables[spread.row, block_of_position] * np.int64(block_size) + offsets
    return HostRows(positions, slots, tables, spread.starts, ends)


@dataclass(frozen=True, slots=True)
class Spread:
    """Tokens, row after row, by their rows. Not to be written to."""

    row: NDArray[np.int64]  # [num_tokens]: whose each is
    offset: NDArray[np.int32]  # [num_tokens]: its place in its row
    starts: NDArray[np.int32]  # [num_rows + 1]: row i is tokens [starts[i], starts[i + 1])


@functools.lru_cache(maxsize=8)
def spread_rows(lengths: bytes) -> Spread:
    """The tokens of rows of these lengths, int32. Kept: most steps have rows of the same lengths as the one before."""
    counts = np.frombuffer(lengths, np.int32)
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    row = np.repeat(np.arange(len(counts)), counts)
    return Spread(row, np.arange(starts[-1], dtype=np.int32) - starts[row], starts)


def spans(starts: NDArray[Int], ends: NDArray[Int]) -> NDArray[Int]:
    """[sum(ends - starts)]: `starts[i], ..., ends[i] - 1` of each i in turn."""
    spread = spread_rows((ends - starts).astype(np.int32, copy=False).tobytes())
    flat: NDArray[Int] = starts[spread.row] + spread.offset.astype(starts.dtype, copy=False)
    return flat


def on_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """The array as a tensor; on the CPU they are the same memory."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device)
