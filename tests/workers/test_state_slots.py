"""Where rows read and write state, and what it costs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from airside.workers.kv_cache import block_bytes, count_kv_blocks
from airside.workers.model_config import load_model_config
from airside.workers.state_slots import (
    LayerState,
    Places,
    StateRows,
    count_state_slots,
    find_state_rows,
    ring_length,
    state_bytes,
    tail_bytes,
)
from airside.workers.step_batch import build_step_batch, read_rows
from tests.checkpoints import make_lfm2
from tests.workers.rows import CPU, NUM_BLOCKS, Row, plan_rows
from tests.workers.step_plans import BLOCK_SIZE, worker_settings

HISTORY, RING = 2, 4
TOKENS = list(range(100))
BLOCKS = [5, 9, 2, 7]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_lfm2(tmp_path_factory.mktemp("lfm2"))


def state_rows(*rows: Row) -> StateRows:
    plan = plan_rows(list(rows))
    batch = build_step_batch(plan, read_rows(plan), BLOCK_SIZE, NUM_BLOCKS, CPU)
    return find_state_rows(batch, HISTORY, RING, BLOCK_SIZE)


def pairs(places: Places | None) -> list[tuple[int, int]]:
    return [] if places is None else list(zip(places.extended.tolist(), places.stored.tolist(), strict=True))


def ring(slot: int, position: int) -> int:
    return slot * RING + position % RING


def tail(block: int, index: int) -> int:
    return block * HISTORY + index


def test_a_first_row_reads_nothing_and_keeps_its_end() -> None:
    rows = state_rows(Row(TOKENS, 0, 9, BLOCKS, slot=3))
    assert rows.tokens.tolist() == list(range(2, 11))
    assert pairs(rows.ring_reads) == pairs(rows.tail_reads) == []
    assert pairs(rows.ring_writes) == [(2 + position, ring(3, position)) for position in (5, 6, 7, 8)]
    assert pairs(rows.tail_writes) == [(4, tail(5, 0)), (5, tail(5, 1)), (8, tail(9, 0)), (9, tail(9, 1))]


def test_a_row_goes_on_from_its_ring_and_ends_a_block_that_another_began() -> None:
    rows = state_rows(Row(TOKENS, 7, 8, BLOCKS, slot=1))
    assert pairs(rows.ring_reads) == [(0, ring(1, 5)), (1, ring(1, 6))]
    assert pairs(rows.ring_writes) == [(2, ring(1, 7))]
    assert pairs(rows.tail_writes) == [(1, tail(9, 0)), (2, tail(9, 1))]


def test_a_row_behind_a_shared_block_reads_its_tail_and_keeps_it() -> None:
    rows = state_rows(Row(TOKENS, 0, 1, [3], slot=0), Row(TOKENS, 8, 9, BLOCKS, slot=2, state_from=9))
    assert rows.tokens.tolist() == [2, 5]
    assert pairs(rows.ring_reads) == []
    assert pairs(rows.tail_reads) == [(3, tail(9, 0)), (4, tail(9, 1))]
    assert pairs(rows.ring_writes) == [(2, ring(0, 0)), (3, ring(2, 6)), (4, ring(2, 7)), (5, ring(2, 8))]
    assert pairs(rows.tail_writes) == []


def test_what_lies_before_the_start_is_zero() -> None:
    state = LayerState(1, NUM_BLOCKS, HISTORY, RING, channels=3, dtype=torch.float32, device=CPU)
    state._rings.fill_(float("nan"))
    rows = state_rows(Row(TOKENS, 1, 2, BLOCKS, slot=0))
    state._rings[ring(0, 0)] = 7
    extended = state.extend(torch.ones(1, 3), rows)
    assert extended.tolist() == [[0, 0, 0], [7, 7, 7], [1, 1, 1]]
    assert state._rings[ring(0, 1)].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([Row(TOKENS, 0, 1, [1], slot=4), Row(TOKENS, 0, 1, [2], slot=4)], "two rows of a step have one state slot"),
        ([Row(TOKENS, 6, 7, BLOCKS, state_from=9)], "taken up within a block"),
        ([Row(TOKENS, 0, 1, BLOCKS, state_from=9)], "taken up at the start"),
    ],
)
def test_contradictions_are_noticed(rows: list[Row], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        state_rows(*rows)


def test_a_plan_without_slots_is_noticed() -> None:
    plan = plan_rows([Row(TOKENS, 0, 1, BLOCKS)], has_state=False)
    batch = build_step_batch(plan, read_rows(plan), BLOCK_SIZE, NUM_BLOCKS, CPU)
    with pytest.raises(AssertionError, match="the plan has no state slots"):
        find_state_rows(batch, HISTORY, RING, BLOCK_SIZE)


@pytest.mark.parametrize(("max_num_seqs", "num_slots"), [(1, 2), (8, 10), (10, 13)])
def test_more_slots_than_can_run(path: Path, llama_path: Path, max_num_seqs: int, num_slots: int) -> None:
    settings = worker_settings(str(path), max_num_seqs=max_num_seqs)
    assert count_state_slots(load_model_config(path), settings) == num_slots
    assert count_state_slots(load_model_config(llama_path), settings) == 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_budget_pays_for_slots_and_tails(path: Path, world_size: int) -> None:
    config = load_model_config(path)
    assert config.short_conv is not None
    settings = worker_settings(str(path), world_size=world_size, max_draft_tokens=2)
    channels, history = config.hidden_size // world_size, config.short_conv.history
    layer = LayerState(
        count_state_slots(config, settings), 6, history, ring_length(history, 2), channels, torch.bfloat16, CPU
    )
    num_layers = len(config.short_conv.layers)
    assert state_bytes(config, settings, torch.bfloat16) == num_layers * layer._rings.nbytes
    assert 6 * tail_bytes(config, settings, torch.bfloat16) == num_layers * layer._tails.nbytes

    slots = state_bytes(config, settings, torch.float32)
    one = block_bytes(config, settings, torch.float32)
    for budget, num_blocks in ((slots + 6 * one, 6), (slots + 6 * one - 1, 5)):
        limited = worker_settings(str(path), world_size=world_size, max_draft_tokens=2, kv_cache_bytes=budget)
        assert count_kv_blocks(config, limited, torch.float32, CPU) == num_blocks
    with pytest.raises(MemoryError, match=r"^0 bytes for KV hold no block"):
        count_kv_blocks(config, worker_settings(str(path), kv_cache_bytes=slots // 2), torch.float32, CPU)
