"""The group of ranks, as far as one process can show it; `test_exchange.py` has more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from airside.workers.parallel import RankGroup


def test_ranks_on_gpus_talk_through_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}  # Any: arguments of several types
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **values: asked.update(values, backend=backend))
    group = RankGroup.connect(1, 2, "file:///nowhere", torch.device("cuda:1"))
    assert (asked["backend"], asked["rank"], asked["world_size"]) == ("nccl", 1, 2)
    assert (group.rank, group.size, group.memory) == (1, 2, None)


def test_a_rank_alone_meets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist, "init_process_group")
    assert RankGroup.connect(0, 1, "", torch.device("cpu")).size == 1


def test_a_group_of_one_takes_the_whole_axis_and_two_share_it() -> None:
    assert RankGroup(0, 1).shard(6) == slice(0, 6)
    assert [RankGroup(rank, 2).shard(6) for rank in range(2)] == [slice(0, 3), slice(3, 6)]
