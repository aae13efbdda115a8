"""Which tokens a draft head computes after a step, and which blocks it has for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from airside.proto.messages import StepPlan
from airside.workers.placed_rows import spans
from airside.workers.sampling_batch import list_sampled_rows, tokens_that_count
from airside.workers.step_batch import Rows


def extend_tables(
    tables: NDArray[np.int32], num_blocks: NDArray[np.int32], first_spare: int, num_spare: int
) -> NDArray[np.int32]:
    """[num_rows, max_blocks + num_spare]: each row's table and, behind its own blocks, spare blocks of nobody else.

    Args:
        num_blocks: [num_rows]: the blocks of each table; what follows in `tables` is padding.
        first_spare: spare blocks are numbered from here on, `num_spare` for each row.
    """
    num_rows, width = tables.shape
    extended = np.zeros((num_rows, width + num_spare), np.int32)
    extended[:, :width] = tables
    places = num_blocks[:, None] + np.arange(num_spare)
    spare = first_spare + np.arange(num_rows * num_spare, dtype=np.int32).reshape(num_rows, num_spare)
    np.put_along_axis(extended, places, spare, axis=1)
    return extended


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step has settled of each row that samples; arrays of [num_sampling]."""

    rows: NDArray[np.int64]  # which rows of the plan they are
    seq_ids: list[int]
    num_counted: NDArray[np.int32]  # sampled tokens that count, at least 1
    newest: NDArray[np.int64]  # the last of them; negative: there was no token, and the sequence has ended
    next_outputs: NDArray[np.int64]  # place in the output of the token after it


def read_outcome(plan: StepPlan, rows: Rows, sampled: Sequence[int]) -> Outcome:
    """The outcome of a step that sampled these tokens, one per flat position."""
    listed = list_sampled_rows(plan, rows)
    counted = [tokens_that_count(sampled[row.begin : row.end], row.drafts) for row in listed]
    num_counted = np.array([len(tokens) for tokens in counted], np.int32)
    return Outcome(
        rows=rows.sampled.nonzero()[0],
        seq_ids=[row.seq_id for row in listed],
        num_counted=num_counted,
        newest=np.array([tokens[-1] for tokens in counted], np.int64),
        next_outputs=np.array([row.position for row in listed], np.int64) + num_counted,
    )


@dataclass(frozen=True, slots=True)
class FollowedTokens:
    """The tokens of a step whose successor is known, row after row; positions `[starts[i], ends[i])` of row i.

        |  chunk of a prompt  |      all but the last, whose successor comes with the next chunk; with it, that one too
        |  ...  | counted |   |      all up to the last that counts, whose successor is the newest token

    `state_ids` and `next_ids` index the step's tokens. Behind those come, in the one the states kept from earlier
    steps, in the other the newest token of each row that samples.
    """

    starts: NDArray[np.int32]  # [num_seqs]
    ends: NDArray[np.int32]  # [num_seqs]; not before the start
    state_ids: NDArray[np.int64]  # [num_tokens]
    next_ids: NDArray[np.int64]  # [num_tokens]


def follow(rows: Rows, outcome: Outcome, with_kept: NDArray[np.bool_]) -> FollowedTokens:
    """The tokens that have a successor.

    Args:
        with_kept: [num_seqs]: whether the state of the token before the row was kept.
    """
    starts = rows.num_computed - with_kept.astype(np.int32)
    ends = rows.num_computed + rows.num_new - 1
    ends[outcome.rows] += 1 + outcome.num_counted - rows.sampled[outcome.rows]
    lengths = ends - starts
    row_of_token = np.repeat(np.arange(len(lengths)), lengths)
    positions = spans(starts, ends).astype(np.int64)
    state_ids = rows.starts[row_of_token] + positions - rows.num_computed[row_of_token]
    next_ids = state_ids + 1
    kept_rank = np.cumsum(with_kept) - 1
    from_before = positions < rows.num_computed[row_of_token]
    state_ids[from_before] = len(rows.token_ids) + kept_rank[row_of_token[from_before]]
    lasts = np.cumsum(lengths)[outcome.rows] - 1
    next_ids[lasts] = len(rows.token_ids) + np.arange(len(outcome.rows))
    return FollowedTokens(starts, ends, state_ids, next_ids)
