"""Bans, and rows that make no token."""

from __future__ import annotations

import dataclasses

import torch

from airside.workers.sampler import sample
from airside.workers.step_batch import build_sampling_batch
from tests.workers.step_plans import Track, plan_step

CPU = torch.device("cpu")


def greedy(logits: torch.Tensor, banned: dict[int, list[int]]) -> list[int]:
    tracks = [Track(row, [1], [row]) for row in range(len(logits))]
    plan = dataclasses.replace(plan_step(1, tracks, [1] * len(tracks)), banned=banned)
    tokens: list[int] = sample(logits.clone(), build_sampling_batch(plan, CPU)).tolist()
    return tokens


def test_each_row_has_its_own_bans() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0]).repeat(4, 1)
    assert greedy(logits, {}) == [3, 3, 3, 3]
    assert greedy(logits, {0: [3], 2: [3, 2], 3: [0]}) == [2, 3, 1, 3]


def test_a_row_of_nothing_but_nan_makes_no_token_and_spares_the_others() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0]).repeat(3, 1)
    logits[1] = torch.nan
    assert greedy(logits, {row: [3] for row in range(3)}) == [2, -1, 2]
