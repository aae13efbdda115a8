"""A row's product has the same bits whatever rows are beside it."""

from __future__ import annotations

import pytest
import torch

from airside.workers.linear import make_linear

NUM_ROWS = 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("out_features", "in_features"), [(192, 128), (960, 576), (576, 1536)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 16, 33, 256])
def test_neighbours_change_no_bit(dtype: torch.dtype, out_features: int, in_features: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((out_features, in_features), generator=generator).to(dtype)
    x = torch.randn((NUM_ROWS, in_features), generator=generator).to(dtype)
    linear = make_linear(weight)
    parts = torch.cat([linear(part) for part in x.split(rows)])
    assert torch.equal(parts, linear(x))


@pytest.mark.parametrize("rows", [1, 6])
def test_meaning(rows: int) -> None:
    x, weight, bias = torch.randn(rows, 24), torch.randn(8, 24), torch.randn(8)
    torch.testing.assert_close(make_linear(weight, bias)(x), x @ weight.T + bias)
