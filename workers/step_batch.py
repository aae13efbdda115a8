"""A step plan as the tensors that a model step reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from airside.proto.messages import StepPlan

S = TypeVar("S", bound=np.generic)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The tokens of a step, row after row, and where their keys and values live."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int32
    slots: Tensor  # [num_tokens] int64, block_id * block_size + offset
    block_tables: Tensor  # [num_seqs, max_blocks] int32, zero-padded
    query_starts: Tensor  # [num_seqs + 1] int32
    context_lens: Tensor  # [num_seqs] int32
    sampled_tokens: Tensor  # [num_sampled] int64: the last token of each row that samples


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling columns of a plan, one entry per row that samples; dtypes as in `ops.sample`.

    The bans of all rows are one list, so that they cost one operation: a model with pictures has some for every row.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor
    banned_rows: Tensor  # [num_banned] int64: an entry of the columns above, and
    banned_ids: Tensor  # [num_banned] int64: a token id that it must not get


def build_step_batch(plan: StepPlan, block_size: int, num_blocks: int, device: torch.device) -> StepBatch:
    """The batch of a plan for a cache of `num_blocks`.

    Raises:
        AssertionError: the plan's columns contradict one another or the cache; the kernels would not notice.
    """
    num_computed = _column(plan.num_computed, np.int32)
    num_new = _column(plan.num_new, np.int32)
    token_ids = _column(plan.token_ids, np.int32)
    sampled = _column(plan.sampled, np.uint8)
    assert len(num_computed) == len(num_new) == len(sampled) > 0, f"step {plan.step_id}: columns of unequal length"
    assert num_new.min() > 0, f"step {plan.step_id}: a row computes nothing"
    assert num_new.sum() == len(token_ids), f"step {plan.step_id}: tokens do not add up"

    query_starts = np.zeros(len(num_new) + 1, np.int32)
    np.cumsum(num_new, out=query_starts[1:])
    row_of_token = np.repeat(np.arange(len(num_new)), num_new)
    positions = num_computed[row_of_token] + np.arange(len(token_ids), dtype=np.int32) - query_starts[row_of_token]
    block_tables = _pad_tables(_column(plan.num_blocks, np.int32), _column(plan.block_tables, np.int32))
    assert positions.max() < block_tables.shape[1] * block_size, f"step {plan.step_id}: a block table is too short"
    assert block_tables.min() >= 0, f"step {plan.step_id}: no such block"
    assert block_tables.max() < num_blocks, f"step {plan.step_id}: no such block"
    blocks = block_tables[row_of_token, positions // block_size].astype(np.int64)

    def tensor(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return StepBatch(
        token_ids=tensor(token_ids.astype(np.int64)),
        positions=tensor(positions),
        slots=tensor(blocks * block_size + positions % block_size),
        block_tables=tensor(block_tables),
        query_starts=tensor(query_starts),
        context_lens=tensor(num_computed + num_new),
        sampled_tokens=tensor(query_starts[1:][sampled == 1].astype(np.int64) - 1),
    )


def build_sampling_batch(plan: StepPlan, device: torch.device) -> SamplingBatch:
    """The sampling columns of a plan."""

    def tensor(data: bytes, dtype: type[np.generic]) -> Tensor:
        return torch.from_numpy(_column(data, dtype).copy()).to(device)

    banned = [(row, token_id) for row, token_ids in plan.banned.items() for token_id in token_ids]
    banned_rows, banned_ids = torch.tensor(banned, dtype=torch.int64, device=device).view(-1, 2).unbind(1)
    return SamplingBatch(
        temperature=tensor(plan.temperature, np.float32),
        top_k=tensor(plan.top_k, np.int32),
        top_p=tensor(plan.top_p, np.float32),
        min_p=tensor(plan.min_p, np.float32),
        seed=tensor(plan.seed, np.int64),
        position=tensor(plan.position, np.int64),
        banned_rows=banned_rows,
        banned_ids=banned_ids,
    )


def _column(data: bytes, dtype: type[S]) -> NDArray[S]:
    return np.frombuffer(data, dtype=dtype)


def _pad_tables(num_blocks: NDArray[np.int32], flat: NDArray[np.int32]) -> NDArray[np.int32]:
    assert num_blocks.sum() == len(flat), "block tables do not add up"
    tables = np.zeros((len(num_blocks), int(num_blocks.max())), np.int32)
    tables[np.arange(tables.shape[1]) < num_blocks[:, None]] = flat
    return tables
