"""A step plan as the tensors that a model step reads."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from airside.proto.messages import StepPlan
from airside.workers.placed_rows import HostRows, PlacedRows, on_device, place_on_host, spans, spread_rows

S = TypeVar("S", bound=np.generic)

_NO_TOKENS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Rows:
    """Which tokens each row of a plan computes, on the host."""

    seq_ids: NDArray[np.uint64]  # [num_seqs]
    num_computed: NDArray[np.int32]  # [num_seqs]
    num_new: NDArray[np.int32]  # [num_seqs]
    sampled: NDArray[np.int32]  # [num_seqs]: how many of the row's last tokens are sampled
    starts: NDArray[np.int32]  # [num_seqs + 1]: row i is tokens [starts[i], starts[i + 1]) of the step
    token_ids: NDArray[np.int64]  # [num_tokens]; tokens in place of placeholders


@dataclass(frozen=True, slots=True)
class HostBatch(HostRows):
    """What a recorded step reads of a batch, as arrays: to copy these takes a fraction of what tensors take."""

    wanted: NDArray[np.int64]
    num_positions: int  # that are sampled


@dataclass(frozen=True, slots=True)
class StepBatch(PlacedRows):
    """The tokens of a step, where their keys and values live, and what is wanted of them.

    | row 0 | row 1 ... | row 2 |         tokens of the step
          ^       ^ ^ ^       ^           sampled: the last of a row, and one more for each draft token
          0       1 2 3       4           flat position: the order of `sampled`, of `StepResult`, of all columns

    """

    token_ids: Tensor  # [num_tokens] int64
    sampled: Tensor  # [num_positions] int64: the tokens that are sampled
    prompt_scored: Tensor  # [num_scored] int64: the tokens whose successors in the prompt get records
    wanted: Tensor  # [num_wanted] int64: the tokens of which the model returns the final state
    state_slots: Tensor | None  # [num_seqs] int64; None: the model has no fixed-size state
    state_from: Tensor | None  # [num_seqs] int64: as in StepPlan; likewise
    tail_ids: Tensor | None  # [num_seqs, tail_tokens] int64: the tokens before each row; None: not asked for
    rows: Rows
    host: HostBatch  # as built: what replaces tensors of the batch leaves it, and makes a step that is not recorded


def needs_sampled_before(plan: StepPlan) -> bool:
    """Whether the plan names tokens by their place in what the step before it sampled."""
    return min(column(plan.token_ids, np.int32).tolist(), default=0) < 0


def read_rows(plan: StepPlan, sampled_before: NDArray[np.int32] | None = None) -> Rows:
    """The row columns of a plan.

    Args:
        sampled_before: what the step before sampled, if `needs_sampled_before`.
    Raises:
        AssertionError: the columns contradict one another.
    """
    num_new = column(plan.num_new, np.int32)
    num_computed = column(plan.num_computed, np.int32)
    token_ids = column(plan.token_ids, np.int32)
    assert len(num_new) > 0, f"step {plan.step_id} has no rows"
    lengths = {len(plan.seq_ids) // 8, len(num_computed), len(num_new), len(plan.sampled)}
    assert len(lengths) == 1, f"step {plan.step_id}: columns of unequal length"
    counts = _count(plan.num_new, plan.sampled)
    assert counts.least_new > 0, f"step {plan.step_id}: a row computes nothing"
    assert counts.total_new == len(token_ids), f"step {plan.step_id}: tokens do not add up"
    assert counts.least_unsampled >= 0, f"step {plan.step_id}: a row samples more than it computes"
    return Rows(
        seq_ids=column(plan.seq_ids, np.uint64),
        num_computed=num_computed,
        num_new=num_new,
        sampled=counts.sampled,
        starts=spread_rows(plan.num_new).starts,
        token_ids=_fill_in(token_ids, sampled_before),
    )


def build_step_batch(
    plan: StepPlan,
    rows: Rows,
    block_size: int,
    num_blocks: int,
    device: torch.device,
    *,
    all_wanted: bool = False,
) -> StepBatch:
    """The batch of a plan for a cache of `num_blocks`.

    Args:
        all_wanted: the final states of all tokens are wanted, and not only of those that get logits.
    Raises:
        AssertionError: the plan's columns contradict one another or the cache; the kernels would not notice.
    """
    ends = rows.num_computed + rows.num_new
    tables = _read_tables(plan.num_blocks, plan.block_tables)
    assert all((ends <= tables.lengths * block_size).tolist()), f"step {plan.step_id}: a block table is too short"
    assert tables.largest_block < num_blocks, f"step {plan.step_id}: no such block"
    placed = place_on_host(rows.num_computed, ends, tables.padded, block_size)
    sampled = _sampled_tokens(plan.num_new, plan.sampled)
    scored = _scored_tokens(plan, rows)
    wanted = np.concatenate((sampled, scored)) if len(scored) else sampled
    if all_wanted:
        wanted = np.arange(len(rows.token_ids))

    def tensor(array: NDArray[np.generic]) -> Tensor:
        return on_device(array, device)

    def per_row(data: bytes) -> Tensor | None:
        return tensor(column(data, np.int32).astype(np.int64).reshape(len(rows.num_new), -1)) if data else None

    positions = placed.positions
    if plan.position_shifts:
        positions = positions - np.repeat(column(plan.position_shifts, np.int32), rows.num_new)
    state_slots, state_from = per_row(plan.state_slots), per_row(plan.state_from)
    return StepBatch(
        positions=tensor(positions),
        slots=tensor(placed.slots),
        block_tables=tensor(placed.block_tables),
        query_starts=tensor(placed.query_starts),
        context_lens=tensor(ends),
        token_ids=tensor(rows.token_ids),
        sampled=tensor(sampled),
        prompt_scored=tensor(scored),
        wanted=tensor(wanted),
        state_slots=None if state_slots is None else state_slots.squeeze(1),
        state_from=None if state_from is None else state_from.squeeze(1),
        tail_ids=per_row(plan.tail_ids),
        rows=rows,
        host=HostBatch(positions, placed.slots, placed.block_tables, placed.query_starts, ends, wanted, len(sampled)),
    )


def column(data: bytes, dtype: type[S]) -> NDArray[S]:
    """A column of a message as an array that cannot be written to."""
    return np.frombuffer(data, dtype=dtype)


def _fill_in(token_ids: NDArray[np.int32], sampled_before: NDArray[np.int32] | None) -> NDArray[np.int64]:
    """A place without a token becomes token 0: its sequence has ended, and nobody will see what comes of the row."""
    if sampled_before is None:
        return token_ids.astype(np.int64)
    before = sampled_before.tolist()  # for the few tokens of most steps, lists are the fastest
    return np.array([max(before[-1 - token], 0) if token < 0 else token for token in token_ids.tolist()], np.int64)


def _scored_tokens(plan: StepPlan, rows: Rows) -> NDArray[np.int64]:
    if not plan.prompt_logprobs:
        return _NO_TOKENS
    firsts = np.array([rows.starts[scored.row] for scored in plan.prompt_logprobs], np.int64)
    row_ends = np.array([rows.starts[scored.row + 1] for scored in plan.prompt_logprobs], np.int64)
    begins = firsts + np.array([scored.start for scored in plan.prompt_logprobs], np.int64)
    ends = begins + np.array([len(scored.targets) // 4 for scored in plan.prompt_logprobs], np.int64)
    are_computed = (firsts <= begins) & (ends <= row_ends)
    assert are_computed.all(), f"step {plan.step_id}: prompt tokens are scored that are not computed"
    return spans(begins, ends)


# What follows is kept for the columns that it is made of: most of them are the same from step to step.


@dataclass(frozen=True, slots=True)
class _Counts:
    """How many tokens the rows compute and sample."""

    sampled: NDArray[np.int32]  # [num_seqs]
    total_new: int
    least_new: int
    least_unsampled: int  # of those that a row computes


@functools.lru_cache(maxsize=4)
def _count(num_new: bytes, sampled: bytes) -> _Counts:
    new, own = column(num_new, np.int32), column(sampled, np.uint8).astype(np.int32)
    return _Counts(own, int(new.sum()), int(new.min()), int((new - own).min()))


@functools.lru_cache(maxsize=4)
def _sampled_tokens(num_new: bytes, sampled: bytes) -> NDArray[np.int64]:
    row_ends = spread_rows(num_new).starts[1:].astype(np.int64)
    return spans(row_ends - column(sampled, np.uint8), row_ends)


@dataclass(frozen=True, slots=True)
class _Tables:
    """The block tables of all rows."""

    lengths: NDArray[np.int32]  # [num_seqs]
    padded: NDArray[np.int32]  # [num_seqs, max(lengths)]; a block 0 is behind a row's own
    largest_block: int  # as an unsigned number, so that a negative one is too large


@functools.lru_cache(maxsize=2)
def _read_tables(num_blocks: bytes, block_tables: bytes) -> _Tables:
    lengths, flat = column(num_blocks, np.int32), column(block_tables, np.int32)
    return _Tables(lengths, _pad_tables(lengths, flat), int(flat.view(np.uint32).max()))


def _pad_tables(num_blocks: NDArray[np.int32], flat: NDArray[np.int32]) -> NDArray[np.int32]:
    assert num_blocks.sum() == len(flat), "block tables do not add up"
    width = int(num_blocks.max())
    if width * len(num_blocks) == len(flat):
        return flat.reshape(-1, width).copy()
    tables = np.zeros((len(num_blocks), width), np.int32)
    tables[np.arange(tables.shape[1]) < num_blocks[:, None]] = flat
    return tables
