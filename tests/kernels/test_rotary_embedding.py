"""`rotary_embedding`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from airside.workers import ops


def tables(positions: int, half: int) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(positions).float(), 10_000.0 ** -(torch.arange(half) / half))
    return angles.cos(), angles.sin()


def meaning(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    c, s = (table[positions.long()].repeat(1, 2).unsqueeze(1).to(x.dtype) for table in (cos, sin))
    return x * c + torch.cat([-second, first], dim=-1) * s


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 16), (3, 1, 6), (2, 1, 80), (1, 1, 256)]
)
def test_is_llamas_rotation_to_the_bit(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    q, k = torch.randn(7, heads, head_dim, dtype=dtype), torch.randn(7, kv_heads, head_dim, dtype=dtype)
    positions = torch.tensor([0, 1, 2, 99, 50, 3, 0], dtype=torch.int32)
    cos, sin = tables(100, head_dim // 2)
    expected_q, expected_k = (meaning(x, positions, cos, sin) for x in (q, k))
    ops.rotary_embedding(q, k, positions, cos, sin)
    assert torch.equal(q, expected_q)
    assert torch.equal(k, expected_k)


def test_slices_of_a_fused_projection_turn_in_place(dtype: torch.dtype) -> None:
    fused = torch.randn(300, 9 * 64 + 2 * 3 * 64, dtype=dtype)  # enough tokens for several threads
    before = fused.clone()
    heads = fused.view(300, 15, 64)
    q, k, v = heads[:, :9], heads[:, 9:12], heads[:, 12:]
    positions = torch.arange(300, dtype=torch.int32)
    cos, sin = tables(300, 32)
    expected = [meaning(x, positions, cos, sin) for x in (q, k)]
    ops.rotary_embedding(q, k, positions, cos, sin)
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])
    assert torch.equal(v, before[:, 12 * 64 :].view(300, 3, 64))


def test_no_tokens() -> None:
    cos, sin = tables(4, 4)
    ops.rotary_embedding(torch.empty(0, 2, 8), torch.empty(0, 1, 8), torch.empty(0, dtype=torch.int32), cos, sin)


@pytest.mark.parametrize("position", [-1, 4])
def test_a_position_without_angles_is_refused(position: int) -> None:
    cos, sin = tables(4, 4)
    with pytest.raises(ValueError, match="a position must be at least 0 and below 4"):
        ops.rotary_embedding(
            torch.ones(1, 2, 8), torch.ones(1, 1, 8), torch.tensor([position], dtype=torch.int32), cos, sin
        )


def test_an_odd_head_is_refused() -> None:
    cos, sin = tables(4, 3)
    with pytest.raises(ValueError, match="rotary_embedding: q"):
        ops.rotary_embedding(torch.ones(1, 1, 7), torch.ones(1, 1, 7), torch.zeros(1, dtype=torch.int32), cos, sin)
