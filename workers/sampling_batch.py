"""The sampling columns of a plan: one entry per sampled position, and the rows that these belong to."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from airside.proto.messages import StepPlan
from airside.workers.placed_rows import on_device, spans
from airside.workers.step_batch import Rows, column


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """One entry per flat position; dtypes as in `ops.sample`.

    The bans of all positions are one list, so that they cost one operation: a model with pictures has some for each.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor
    banned_positions: Tensor  # [num_banned] int64: an entry of the columns above, and
    banned_ids: Tensor  # [num_banned] int64: a token id that it must not get


@dataclass(frozen=True, slots=True)
class SampledRow:
    """A row of the plan that samples."""

    seq_id: int
    index: int  # among the rows that sample: its entry in the plan's columns
    begin: int  # the flat position of its first sampled token
    position: int  # the place of that token in the sequence's output
    drafts: list[int]  # the tokens that follow it in the row; each is verified by the token sampled before it

    @property
    def end(self) -> int:
        """The flat position after its last."""
        return self.begin + 1 + len(self.drafts)


def build_sampling_batch(plan: StepPlan, rows: Rows, device: torch.device) -> SamplingBatch:
    """The sampling columns of a plan; a row with drafts has its values once per position."""
    fixed = _fixed_columns(
        plan.temperature, plan.top_k, plan.top_p, plan.min_p, plan.seed, rows.sampled.tobytes(), device
    )
    nothing = fixed.nothing
    banned_positions, banned_ids = _flat_bans(plan.banned, device) if plan.banned else (nothing, nothing)
    first_positions = column(plan.position, np.int64)
    positions = (
        first_positions.copy() if fixed.counts is None else spans(first_positions, first_positions + fixed.counts)
    )
    return SamplingBatch(
        temperature=fixed.temperature,
        top_k=fixed.top_k,
        top_p=fixed.top_p,
        min_p=fixed.min_p,
        seed=fixed.seed,
        position=on_device(positions, device),
        banned_positions=banned_positions,
        banned_ids=banned_ids,
    )


@dataclass(frozen=True, slots=True)
class _FixedColumns:
    """Those of `SamplingBatch` that stay the same while the same sequences sample. Not to be written to."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    nothing: Tensor  # [0] int64
    counts: NDArray[np.int32] | None  # [num_sampling]: positions of each row that samples; None: each has one


@functools.lru_cache(maxsize=4)
def _fixed_columns(
    temperature: bytes, top_k: bytes, top_p: bytes, min_p: bytes, seed: bytes, sampled: bytes, device: torch.device
) -> _FixedColumns:
    """`sampled`: int32, as `Rows.sampled`. Kept: most steps have the sequences of the one before."""
    per_row = column(sampled, np.int32)
    counts = per_row[per_row > 0]

    def per_position(values: NDArray[np.generic]) -> Tensor:
        return on_device(np.repeat(values, counts), device)

    return _FixedColumns(
        temperature=per_position(column(temperature, np.float32)),
        top_k=per_position(column(top_k, np.int32)),
        top_p=per_position(column(top_p, np.float32)),
        min_p=per_position(column(min_p, np.float32)),
        seed=per_position(column(seed, np.int64)),
        nothing=torch.empty(0, dtype=torch.int64, device=device),
        counts=counts if per_row.max() > 1 else None,
    )


def _flat_bans(banned: dict[int, list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    flat = [(place, token_id) for place, token_ids in banned.items() for token_id in token_ids]
    places, token_ids = torch.tensor(flat, dtype=torch.int64, device=device).view(-1, 2).unbind(1)
    return places, token_ids


def list_sampled_rows(plan: StepPlan, rows: Rows) -> list[SampledRow]:
    """The rows that sample, in the plan's order."""
    sampling = (rows.sampled > 0).nonzero()[0]
    counts = rows.sampled[sampling]
    begins = (np.cumsum(counts) - counts).tolist()
    positions = column(plan.position, np.int64).tolist()
    return [
        SampledRow(
            seq_id=int(rows.seq_ids[row]),
            index=index,
            begin=begins[index],
            position=positions[index],
            drafts=rows.token_ids[rows.starts[row + 1] - counts[index] + 1 : rows.starts[row + 1]].tolist(),
        )
        for index, row in enumerate(sampling.tolist())
    ]


def tokens_that_count(sampled: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """The sampled tokens of a row up to and including the first that differs from the draft beside it.

    Args:
        sampled: one more than drafts. A token is compared with the draft at the position after it.
    """
    for index, (token, draft) in enumerate(zip(sampled, drafts, strict=False)):
        if token != draft:
            return list(sampled[: index + 1])
    return list(sampled)
