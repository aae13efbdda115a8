"""A plan's columns as tensors."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from airside.proto.messages import PromptLogprobRow, StepPlan
from airside.workers.sampling_batch import SamplingBatch, build_sampling_batch, list_sampled_rows
from airside.workers.step_batch import StepBatch, build_step_batch, needs_sampled_before, read_rows
from tests.workers.step_plans import Track, plan_step

CPU = torch.device("cpu")


def tracks() -> list[Track]:
    """A chunk in the middle of a prompt, a decode at the start of a block, and a whole prompt. Blocks of 4."""
    return [
        Track(1, tokens=[10, 11, 12, 13, 14, 15, 16, 17, 18], blocks=[7, 2, 5], computed=2),
        Track(2, tokens=[20, 21, 22, 23, 24], blocks=[3, 9], computed=4),
        Track(3, tokens=[30, 31], blocks=[0], banned=[1, 2]),
    ]


def step_batch(plan: StepPlan, before: np.ndarray | None = None, *, all_wanted: bool = False) -> StepBatch:
    return build_step_batch(plan, read_rows(plan, before), 4, 10, CPU, all_wanted=all_wanted)


def sampling_batch(plan: StepPlan) -> SamplingBatch:
    return build_sampling_batch(plan, read_rows(plan), CPU)


def test_tokens_positions_and_slots() -> None:
    batch = step_batch(plan_step(1, tracks(), [4, 1, 2]))
    assert batch.token_ids.tolist() == [12, 13, 14, 15, 24, 30, 31]
    assert batch.positions.tolist() == [2, 3, 4, 5, 4, 0, 1]
    assert batch.slots.tolist() == [30, 31, 8, 9, 36, 0, 1]
    assert batch.block_tables.tolist() == [[7, 2], [3, 9], [0, 0]]
    assert batch.query_starts.tolist() == [0, 4, 5, 7]
    assert batch.context_lens.tolist() == [6, 5, 2]
    assert batch.sampled.tolist() == batch.wanted.tolist() == [4, 6]
    assert (batch.state_slots, batch.state_from, batch.tail_ids) == (None, None, None)


def test_rows_behind_pictures_have_earlier_positions_but_the_same_slots() -> None:
    plan = plan_step(1, tracks(), [4, 1, 2])
    batch = step_batch(dataclasses.replace(plan, position_shifts=np.array([2, 0, 0], np.int32).tobytes()))
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert batch.positions.dtype is torch.int32
    assert batch.slots.tolist() == step_batch(plan).slots.tolist()


def test_drafts_are_sampled_too() -> None:
    own = tracks()
    own[1].drafts = [25, 26]
    own[2].seed, own[2].made, own[2].banned = 7, [31], []
    plan = plan_step(1, own, [4, 1, 2])
    batch = step_batch(plan)
    assert batch.token_ids.tolist() == [12, 13, 14, 15, 24, 25, 26, 30, 31]
    assert batch.positions.tolist() == [2, 3, 4, 5, 4, 5, 6, 0, 1]
    assert batch.sampled.tolist() == [4, 5, 6, 8]
    sampling = sampling_batch(plan)
    assert sampling.position.tolist() == [0, 1, 2, 1]
    assert sampling.seed.tolist() == [0, 0, 0, 7]
    rows = list_sampled_rows(plan, read_rows(plan))
    assert [(row.seq_id, row.index, row.begin, row.end, row.position, row.drafts) for row in rows] == [
        (2, 0, 0, 3, 0, [25, 26]),
        (3, 1, 3, 4, 1, []),
    ]


def test_placeholders_are_what_the_step_before_sampled() -> None:
    own = tracks()
    own[1].tokens[-1] = -1 - 2
    own[2].tokens[-1] = -1 - 0
    plan = plan_step(1, own, [4, 1, 2])
    assert needs_sampled_before(plan)
    batch = step_batch(plan, np.array([50, 51, -1], np.int32))
    assert batch.token_ids.tolist() == [12, 13, 14, 15, 0, 30, 50], "a place without a token is computed as token 0"
    assert not needs_sampled_before(plan_step(1, tracks(), [4, 1, 2]))


def test_prompt_tokens_that_are_scored_are_wanted_after_those_that_are_sampled() -> None:
    scored = [PromptLogprobRow(0, 1, 0, np.zeros(2, np.int32).tobytes()), PromptLogprobRow(2, 0, 0, bytes(4))]
    plan = dataclasses.replace(plan_step(1, tracks(), [4, 1, 2]), prompt_logprobs=scored)
    batch = step_batch(plan)
    assert batch.prompt_scored.tolist() == [1, 2, 5]
    assert batch.wanted.tolist() == [4, 6, 1, 2, 5]
    assert step_batch(plan, all_wanted=True).wanted.tolist() == list(range(7))


def test_columns_of_states_and_tails() -> None:
    plan = dataclasses.replace(
        plan_step(1, tracks(), [4, 1, 2]),
        state_slots=np.array([5, 0, 2], np.int32).tobytes(),
        state_from=np.array([-1, 3, -1], np.int32).tobytes(),
        tail_ids=np.array([10, 11, 22, 23, -1, -1], np.int32).tobytes(),
    )
    batch = step_batch(plan)
    assert batch.state_slots is not None
    assert batch.state_from is not None
    assert batch.tail_ids is not None
    assert batch.state_slots.tolist() == [5, 0, 2]
    assert batch.state_from.tolist() == [-1, 3, -1]
    assert batch.tail_ids.tolist() == [[10, 11], [22, 23], [-1, -1]]


def test_sampling_columns() -> None:
    batch = sampling_batch(plan_step(1, tracks(), [4, 1, 2]))
    assert batch.temperature.shape == (2,)
    assert batch.seed.dtype is torch.int64
    assert batch.banned_positions.tolist() == [1, 1]
    assert batch.banned_ids.tolist() == [1, 2]


def test_the_largest_seed_keeps_its_bits() -> None:
    plan = dataclasses.replace(plan_step(1, tracks()[1:2], [1]), seed=np.array([2**64 - 1], np.uint64).tobytes())
    assert sampling_batch(plan).seed.tolist() == [-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_new": np.array([5, 1, 2], np.int32).tobytes()}, "tokens do not add up"),
        ({"num_new": np.array([4, 1], np.int32).tobytes()}, "unequal length"),
        ({"sampled": bytes([0, 2, 1])}, "samples more than it computes"),
        ({"prompt_logprobs": [PromptLogprobRow(0, 2, 0, bytes(12))]}, "scored that are not computed"),
        ({"prompt_logprobs": [PromptLogprobRow(1, -1, 0, bytes(4))]}, "scored that are not computed"),
        ({"num_blocks": np.array([2, 2, 2], np.int32).tobytes()}, "block tables do not add up"),
        ({"block_tables": np.array([7, 2, 3, 9, 10], np.int32).tobytes()}, "no such block"),
        ({"num_computed": np.array([2, 8, 0], np.int32).tobytes()}, "too short"),
    ],
)
def test_contradictions_are_noticed(change: dict[str, bytes], message: str) -> None:
    plan = dataclasses.replace(plan_step(1, tracks(), [4, 1, 2]), **change)
    with pytest.raises(AssertionError, match=message):
        step_batch(plan)
