"""`kv_cache_write`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from airside.workers import ops


def caches(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.zeros(6, 3, 4, 20, dtype=dtype), torch.zeros(6, 3, 4, 20, dtype=dtype)


def test_each_token_lands_in_its_slot_and_nowhere_else(dtype: torch.dtype) -> None:
    fused = torch.randn(5, 9 * 20, dtype=dtype)  # rows of k and v are strided slices
    k, v = fused[:, :60].view(5, 3, 20), fused[:, 120:].view(5, 3, 20)
    slots = torch.tensor([0, 7, 23, 4, 13])
    k_cache, v_cache = caches(dtype)
    ops.kv_cache_write(k, v, k_cache, v_cache, slots)
    for written, cache in ((k, k_cache), (v, v_cache)):
        expected = torch.zeros_like(cache)
        expected[slots // 4, :, slots % 4] = written
        assert torch.equal(cache, expected)


def test_many_tokens_at_once(dtype: torch.dtype) -> None:
    k, v = torch.randn(4096, 2, 64, dtype=dtype), torch.randn(4096, 2, 64, dtype=dtype)
    k_cache, v_cache = torch.zeros(256, 2, 16, 64, dtype=dtype), torch.zeros(256, 2, 16, 64, dtype=dtype)
    ops.kv_cache_write(k, v, k_cache, v_cache, torch.arange(4096).flip(0))
    assert torch.equal(k_cache.transpose(1, 2).reshape(4096, 2, 64).flip(0), k)
    assert torch.equal(v_cache.transpose(1, 2).reshape(4096, 2, 64).flip(0), v)


def test_no_tokens_change_nothing() -> None:
    k_cache, v_cache = caches(torch.float32)
    none = torch.empty(0, 3, 20)
    ops.kv_cache_write(none, none, k_cache, v_cache, torch.empty(0, dtype=torch.int64))
    assert not k_cache.any()


@pytest.mark.parametrize("slot", [-1, 24])
def test_a_slot_outside_the_cache_is_refused(slot: int) -> None:
    k_cache, v_cache = caches(torch.float32)
    row = torch.ones(1, 3, 20)
    with pytest.raises(ValueError, match="a slot must be at least 0 and below 24"):
        ops.kv_cache_write(row, row, k_cache, v_cache, torch.tensor([slot]))
    assert not k_cache.any()


def test_other_shapes_and_dtypes_are_refused() -> None:
    k_cache, v_cache = caches(torch.float32)
    row, slot = torch.ones(1, 3, 20), torch.tensor([0])
    with pytest.raises(ValueError, match="kv_cache_write: k_cache"):
        ops.kv_cache_write(row.bfloat16(), row.bfloat16(), k_cache, v_cache, slot)
    with pytest.raises(ValueError, match="kv_cache_write: v must be"):
        ops.kv_cache_write(row, torch.ones(1, 2, 20), k_cache, v_cache, slot)
    with pytest.raises(ValueError, match="kv_cache_write: slots must be int64"):
        ops.kv_cache_write(row, row, k_cache, v_cache, slot.int())
