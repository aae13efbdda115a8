"""`kv_cache_write`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from airside.workers import ops


def caches(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.zeros(6, 3, 4, 20, dtype=dtype), torch.zeros(6, 3, 4, 20, dtype=dtype)


def paired(blocks: Tensor) -> Tensor:
    """[num_blocks, num_kv_heads, size, others] -> pairs of `size` side by side; an odd last index is behind them."""
    even = blocks.shape[-2] // 2 * 2
    pairs = blocks[..., :even, :].reshape(*blocks.shape[:2], even // 2, 2, blocks.shape[3]).transpose(-1, -2).flatten(2)
    return torch.cat([pairs, blocks[..., even:, :].flatten(-2)], dim=-1).view(blocks.shape)


def laid_out(k_blocks: Tensor, v_blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[num_blocks, num_kv_heads, block_size, head_dim] -> what the caches hold (csrc/kernels/cpu/kv_layout.h)."""
    k_blocks = k_blocks.transpose(2, 3)
    if k_blocks.dtype is not torch.float32:
        k_blocks, v_blocks = paired(k_blocks), paired(v_blocks)
    return k_blocks.reshape(v_blocks.shape), v_blocks


@pytest.mark.parametrize("head_dim", [20, 64, 7])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_each_token_lands_in_its_slot_and_nowhere_else(dtype: torch.dtype, block_size: int, head_dim: int) -> None:
    fused = torch.randn(5, 9 * head_dim, dtype=dtype)  # rows of k and v are strided slices
    k, v = (fused[:, at * head_dim : (at + 3) * head_dim].view(5, 3, head_dim) for at in (0, 6))
    slots = torch.tensor([0, 7, 23, 4, 13])
    blocks = torch.full((2, 24, 3, block_size, head_dim), 7.0, dtype=dtype)
    k_cache, v_cache = blocks.clone()
    ops.kv_cache_write(k, v, k_cache, v_cache, slots)
    for written, into in zip((k, v), blocks, strict=True):
        into[slots // block_size, :, slots % block_size] = written
    for cache, expected in zip((k_cache, v_cache), laid_out(*blocks), strict=True):
        assert torch.equal(cache, expected)


def test_many_tokens_at_once(dtype: torch.dtype) -> None:
    k, v = torch.randn(2, 4096, 2, 64, dtype=dtype)
    k_cache, v_cache = torch.zeros(2, 256, 2, 16, 64, dtype=dtype)
    ops.kv_cache_write(k, v, k_cache, v_cache, torch.arange(4096).flip(0))
    expected = laid_out(*(rows.flip(0).view(256, 16, 2, 64).transpose(1, 2) for rows in (k, v)))
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])


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
