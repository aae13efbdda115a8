"""How many blocks a rank says it can hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from airside.workers.kv_cache import allocate_kv_cache, block_bytes, count_kv_blocks
from airside.workers.model_config import load_model_config
from tests.workers.step_plans import BLOCK_SIZE, worker_settings

CPU = torch.device("cpu")


def count(path: Path, **changes: object) -> int:
    return count_kv_blocks(load_model_config(path), worker_settings(str(path), **changes), torch.float32, CPU)


def test_a_block_has_the_bytes_of_its_tensors(llama_path: Path) -> None:
    config = load_model_config(llama_path)
    for world_size in (1, 2):
        settings = worker_settings(str(llama_path), world_size=world_size)
        cache = allocate_kv_cache(config, settings, 3, torch.bfloat16, CPU)
        assert cache[0].k.shape == (3, config.num_kv_heads // world_size, BLOCK_SIZE, config.head_dim)
        num_bytes = sum(layer.k.nbytes + layer.v.nbytes for layer in cache)
        assert num_bytes == 3 * block_bytes(config, settings, torch.bfloat16)


def test_the_budget_decides_and_the_limits_cap_it(llama_path: Path) -> None:
    one = block_bytes(load_model_config(llama_path), worker_settings(str(llama_path)), torch.float32)
    assert count(llama_path, kv_cache_bytes=10 * one - 1) == 9
    assert count(llama_path, kv_cache_bytes=10 * one, world_size=2) == 20
    assert count(llama_path, kv_cache_bytes=10 * one, num_kv_blocks_max=4) == 4
    unused = {"kv_cache_bytes": 1000 * one, "num_kv_blocks_max": None}
    assert count(llama_path, **unused, max_num_seqs=2, max_model_len=9) == 2 * 3  # all that two sequences could fill


def test_too_little_for_one_block_is_an_error_that_says_what_helps(llama_path: Path) -> None:
    with pytest.raises(MemoryError, match=r"raise engine\.kv_cache_memory or lower engine\.block_size"):
        count(llama_path, kv_cache_bytes=100)
