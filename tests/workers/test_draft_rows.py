"""Which tokens a draft head computes after a step, and what it keeps until the next."""

from __future__ import annotations

import numpy as np
import torch

from airside.workers.draft_memory import DraftMemory
from airside.workers.draft_rows import extend_tables, follow, read_outcome
from airside.workers.placed_rows import place_rows, spans
from airside.workers.step_batch import read_rows
from tests.workers.step_plans import BLOCK_SIZE, Track, plan_step


def track(seq_id: int, num_tokens: int, computed: int, drafts: tuple[int, ...] = (), made: int = 0) -> Track:
    """A sequence whose tokens are 100 * its id + their position."""
    tokens = [100 * seq_id + position for position in range(num_tokens)]
    blocks = [10 * seq_id + block for block in range(8)]
    return Track(seq_id, tokens, blocks, computed=computed, drafts=list(drafts), made=tokens[num_tokens - made :])


def test_tokens_with_a_successor_are_followed() -> None:
    tracks = [
        track(1, 9, 4),  # a chunk of a prompt, with the token before it
        track(2, 9, 5),  # a chunk of one token, whose successor is not known yet
        track(3, 6, 5, made=1),  # a plain decode
        track(4, 6, 5, (41, 42, 43), made=2),  # drafts, of which one is right
        track(5, 3, 0),  # a whole prompt
    ]
    plan = plan_step(0, tracks, [3, 1, 1, 1, 3])
    rows = read_rows(plan, None)
    outcome = read_outcome(plan, rows, [-1, 41, 7, 43, 44, 9])
    assert outcome.rows.tolist() == [2, 3, 4]
    assert outcome.seq_ids == [3, 4, 5]
    assert outcome.num_counted.tolist() == [1, 2, 1]
    assert outcome.newest.tolist() == [-1, 7, 9]
    assert outcome.next_outputs.tolist() == [2, 4, 1]

    followed = follow(rows, outcome, np.array([True, False, False, False, False]))
    assert followed.starts.tolist() == [3, 5, 5, 5, 0]
    assert followed.ends.tolist() == [6, 5, 6, 7, 3]
    # step's tokens: 104 105 106 | 205 | 305 | 405 41 42 43 | 500 501 502, then one kept state, or the newest of three
    assert followed.state_ids.tolist() == [12, 0, 1, 4, 5, 6, 9, 10, 11]
    assert followed.next_ids.tolist() == [0, 1, 2, 12, 6, 13, 10, 11, 14]


def test_spans_may_be_empty() -> None:
    starts, ends = np.array([3, 8, 8, 2]), np.array([5, 8, 9, 2])
    assert spans(starts, ends).tolist() == [3, 4, 8]
    assert spans(starts[1:2], ends[1:2]).tolist() == []


def test_rows_are_placed_in_their_blocks() -> None:
    starts, ends = np.array([3, 8], np.int32), np.array([6, 9], np.int32)
    tables = np.array([[5, 2, 0], [1, 3, 4]], np.int32)
    placed = place_rows(starts, ends, tables, BLOCK_SIZE, torch.device("cpu"))
    assert placed.positions.tolist() == [3, 4, 5, 8]
    assert placed.slots.tolist() == [5 * BLOCK_SIZE + 3, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 1, 4 * BLOCK_SIZE]
    assert placed.query_starts.tolist() == [0, 3, 4]
    assert placed.context_lens.tolist() == [6, 9]


def test_spare_blocks_come_behind_each_rows_own() -> None:
    tables = np.array([[5, 2], [7, 0]], np.int32)
    assert extend_tables(tables, np.array([2, 1], np.int32), 100, 2).tolist() == [[5, 2, 100, 101], [7, 102, 103, 0]]
    assert extend_tables(tables, np.array([2, 1], np.int32), 100, 0).tolist() == tables.tolist()


def test_states_are_taken_by_the_row_that_follows() -> None:
    memory = DraftMemory(num_seqs_max=2)
    chunks = read_rows(plan_step(0, [track(seq_id, 20, 4) for seq_id in (1, 2, 3)], [3, 3, 3]), None)
    memory.keep_states(chunks, np.arange(3), torch.eye(3))
    nexts = read_rows(plan_step(1, [track(1, 20, 7), track(2, 20, 8), track(3, 20, 7)], [3, 3, 3]), None)
    with_kept, states = memory.take_states(nexts)
    assert with_kept.tolist() == [False, False, True], "the first made room, the second is for another row"
    assert [state.tolist() for state in states] == [[[0.0, 0.0, 1.0]]]
    assert not memory.take_states(nexts)[0].any()


def test_distributions_are_kept_of_few_sequences() -> None:
    memory = DraftMemory(num_seqs_max=2)
    for seq_id in (1, 2, 3):
        memory.keep_log_q(seq_id, 5, torch.tensor([float(seq_id)]))
        memory.keep_log_q(seq_id, 6, torch.tensor([-1.0]))
    assert memory.log_q(1, 5) is None
    kept = memory.log_q(2, 5)
    assert kept is not None
    assert kept.item() == 2.0
    memory.forget_log_q([2])
    assert memory.log_q(2, 6) is None
    assert memory.log_q(3, 6) is not None
