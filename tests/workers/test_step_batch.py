"""A plan's columns as tensors."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from airside.workers.step_batch import build_sampling_batch, build_step_batch
from tests.workers.step_plans import Track, plan_step

CPU = torch.device("cpu")


def tracks() -> list[Track]:
    """A chunk in the middle of a prompt, a decode at the start of a block, and a whole prompt. Blocks of 4."""
    return [
        Track(1, tokens=[10, 11, 12, 13, 14, 15, 16, 17, 18], blocks=[7, 2, 5], computed=2),
        Track(2, tokens=[20, 21, 22, 23, 24], blocks=[3, 9], computed=4),
        Track(3, tokens=[30, 31], blocks=[0], banned=[1, 2]),
    ]


def test_tokens_positions_and_slots() -> None:
    batch = build_step_batch(plan_step(1, tracks(), [4, 1, 2]), 4, 10, CPU)
    assert batch.token_ids.tolist() == [12, 13, 14, 15, 24, 30, 31]
    assert batch.positions.tolist() == [2, 3, 4, 5, 4, 0, 1]
    assert batch.slots.tolist() == [30, 31, 8, 9, 36, 0, 1]
    assert batch.block_tables.tolist() == [[7, 2], [3, 9], [0, 0]]
    assert batch.query_starts.tolist() == [0, 4, 5, 7]
    assert batch.context_lens.tolist() == [6, 5, 2]
    assert batch.sampled_tokens.tolist() == [4, 6]


def test_sampling_columns() -> None:
    batch = build_sampling_batch(plan_step(1, tracks(), [4, 1, 2]), CPU)
    assert batch.temperature.shape == (2,)
    assert batch.seed.dtype is torch.int64
    assert batch.banned_rows.tolist() == [1, 1]
    assert batch.banned_ids.tolist() == [1, 2]


def test_the_largest_seed_keeps_its_bits() -> None:
    plan = dataclasses.replace(plan_step(1, tracks()[1:2], [1]), seed=np.array([2**64 - 1], np.uint64).tobytes())
    assert build_sampling_batch(plan, CPU).seed.tolist() == [-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_new": np.array([5, 1, 2], np.int32).tobytes()}, "tokens do not add up"),
        ({"num_new": np.array([4, 1], np.int32).tobytes()}, "unequal length"),
        ({"num_blocks": np.array([2, 2, 2], np.int32).tobytes()}, "block tables do not add up"),
        ({"block_tables": np.array([7, 2, 3, 9, 10], np.int32).tobytes()}, "no such block"),
        ({"num_computed": np.array([2, 8, 0], np.int32).tobytes()}, "too short"),
    ],
)
def test_contradictions_are_noticed(change: dict[str, bytes], message: str) -> None:
    plan = dataclasses.replace(plan_step(1, tracks(), [4, 1, 2]), **change)
    with pytest.raises(AssertionError, match=message):
        build_step_batch(plan, 4, 10, CPU)
