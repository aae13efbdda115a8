"""The fixed-size state of sequences: what the convolutions of a hybrid model have lately been given.

Per sequence and layer a slot holds a ring over positions, so that a row may start anywhere not too far behind where the
one before it ended: the inputs of drafts that were rejected are overwritten, and nothing is taken back.

    positions of a sequence    ... 7  8  9 10 11 |12        a row that starts at 12 reads 10 and 11 (history 2)
    its ring of 6 places           9 is at 9 % 6 = 3        it may have reached up to 15 with drafts, and not over 10

Per KV block and layer the last inputs before the block's end are kept beside it, the block's tail: a sequence that
shares the block and starts right after it takes them up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from airside.proto.settings import WorkerSettings
from airside.workers.model_config import ModelConfig
from airside.workers.step_batch import StepBatch


def count_state_slots(config: ModelConfig, settings: WorkerSettings) -> int:
    """How many sequences' state this rank holds; 0: the model has none.

    A quarter more than can run at once: a sequence that waits for its grammar or a picture keeps its slot.
    """
    return 0 if config.short_conv is None else settings.max_num_seqs + -(-settings.max_num_seqs // 4)


def state_bytes(config: ModelConfig, settings: WorkerSettings, dtype: torch.dtype) -> int:
    """Bytes of all slots on this rank."""
    if config.short_conv is None:
        return 0
    inputs = count_state_slots(config, settings) * ring_length(config.short_conv.history, settings.max_draft_tokens)
    return inputs * _input_bytes(config, settings, dtype)


def tail_bytes(config: ModelConfig, settings: WorkerSettings, dtype: torch.dtype) -> int:
    """Bytes of one KV block's tail over all layers of this rank."""
    return 0 if config.short_conv is None else config.short_conv.history * _input_bytes(config, settings, dtype)


def _input_bytes(config: ModelConfig, settings: WorkerSettings, dtype: torch.dtype) -> int:
    assert config.short_conv is not None
    return len(config.short_conv.layers) * (config.hidden_size // settings.world_size) * dtype.itemsize


def ring_length(history: int, max_draft_tokens: int) -> int:
    """Places of a ring: what a row reads, its first token, and as many drafts as may lie beyond the next row.

    Forced tokens may be more than that: they are never rejected, so the next row starts where they end.
    """
    return history + 1 + max_draft_tokens


class LayerState:
    """One layer's rings and tails. Not zeroed: nothing is read before it is written."""

    def __init__(
        self,
        num_slots: int,
        num_blocks: int,
        history: int,
        ring: int,
        channels: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._rings = torch.empty((num_slots * ring, channels), dtype=dtype, device=device)
        self._tails = torch.empty((num_blocks * history, channels), dtype=dtype, device=device)

    def extend(self, inputs: Tensor, rows: StateRows) -> Tensor:
        """Each row's inputs behind those of its history; keeps what later rows will read.

        Args:
            inputs: [num_tokens, channels].
        Returns: [num_tokens + num_seqs * history, channels], zero where the history reaches over the start.
        """
        extended = inputs.new_zeros((rows.num_extended, inputs.shape[1]))
        extended.index_copy_(0, rows.tokens, inputs)
        for read, store in ((rows.ring_reads, self._rings), (rows.tail_reads, self._tails)):
            if read is not None:
                extended.index_copy_(0, read.extended, store.index_select(0, read.stored))
        for write, store in ((rows.ring_writes, self._rings), (rows.tail_writes, self._tails)):
            if write is not None:
                store.index_copy_(0, write.stored, extended.index_select(0, write.extended))
        return extended


@dataclass(frozen=True, slots=True)
class Places:
    """Pairs of places, [n] int64 each: in the extended rows, and in a layer's rings or tails."""

    extended: Tensor
    stored: Tensor


@dataclass(frozen=True, slots=True)
class StateRows:
    """Where the rows of a step read and write state; the same for all layers. None: nowhere.

    Extended rows are a step's rows, each with the places of its history before it:

        | h h 5 6 7 | h h 0 | h h 31 |        history 2, rows of 3, 1 and 1 tokens
    """

    num_extended: int
    tokens: Tensor  # [num_tokens] int64: each token's place in the extended rows
    ring_reads: Places | None
    tail_reads: Places | None
    ring_writes: Places | None
    tail_writes: Places | None


def find_state_rows(batch: StepBatch, history: int, ring: int, block_size: int) -> StateRows:
    """Where this step's rows read and write.

    Args:
        history, ring: inputs before a row that it reads; places of a ring.
    Raises:
        AssertionError: the plan names no slots, one twice, or a tail that is not right before its row.
    """
    assert batch.state_slots is not None, "the plan has no state slots"
    assert batch.state_from is not None, "the plan does not say where states are taken up"
    slots, taken_from = batch.state_slots.cpu().numpy(), batch.state_from.cpu().numpy()
    starts, num_new = batch.rows.num_computed.astype(np.int64), batch.rows.num_new.astype(np.int64)
    assert len(np.unique(slots)) == len(slots), "two rows of a step have one state slot"
    assert (starts[taken_from >= 0] % block_size == 0).all(), "a state is taken up within a block"
    assert (starts[taken_from >= 0] > 0).all(), "a state is taken up at the start"

    row = np.repeat(np.arange(len(num_new)), num_new + history)
    begins = batch.rows.starts[:-1].astype(np.int64) + np.arange(len(num_new)) * history
    position = np.arange(len(row)) - begins[row] + starts[row] - history
    start, end, slot, block = starts[row], (starts + num_new)[row], slots[row], taken_from[row]
    is_new = position >= start
    in_ring = slot * ring + position % ring
    block_end = (position // block_size + 1) * block_size
    in_tail = history - block_end + position  # below 0: before the tail
    tables = batch.block_tables.cpu().numpy()
    own_block = tables[row, np.minimum(position // block_size, tables.shape[1] - 1)].astype(np.int64)

    def places(chosen: NDArray[np.bool_], stored: NDArray[np.int64]) -> Places | None:
        found = np.flatnonzero(chosen & (position >= 0))
        return Places(_tensor(found, batch), _tensor(stored[found], batch)) if len(found) else None

    # What comes from a tail goes into the ring as well: the next row may reach back over this one's start.
    is_kept = (is_new | (block >= 0)) & (position >= end - ring)
    return StateRows(
        num_extended=len(row),
        tokens=_tensor(np.flatnonzero(is_new), batch),
        ring_reads=places(~is_new & (block < 0), in_ring),
        tail_reads=places(~is_new & (block >= 0), block * history + position - (start - history)),
        ring_writes=places(is_kept, in_ring),
        tail_writes=places((in_tail >= 0) & (start < block_end) & (block_end <= end), own_block * history + in_tail),
    )


def _tensor(array: NDArray[np.int64], batch: StepBatch) -> Tensor:
    return torch.from_numpy(array).to(batch.token_ids.device)
