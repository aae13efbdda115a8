"""Rows of a packed weight are those that it was made of."""

from __future__ import annotations

import pytest
import torch

from airside.workers import ops
from airside.workers.packed_weight import PackedWeight


def pack(weight: torch.Tensor) -> PackedWeight:
    return ops.pack_weight(weight, str(weight.dtype).removeprefix("torch."))


@pytest.mark.parametrize("out_features", [1, 31, 32, 33, 577])
@pytest.mark.parametrize("in_features", [1, 2, 3, 64, 577])
def test_every_row_has_its_bits(dtype: torch.dtype, out_features: int, in_features: int) -> None:
    weight = torch.randn(out_features, in_features).to(dtype)
    weight[0, 0], weight[-1, -1] = float("nan"), -0.0
    packed = pack(weight)
    assert packed.is_exact
    for rows in (torch.arange(out_features), torch.randint(0, out_features, (200,)), torch.arange(0)):
        out = ops.gather_packed_rows(packed, rows)
        assert out.dtype == dtype
        assert torch.equal(out.view(torch.uint8), weight[rows].view(torch.uint8))


@pytest.mark.parametrize("row", [-1, 32])
def test_a_row_that_there_is_not_is_refused(row: int) -> None:
    with pytest.raises(ValueError, match="gather_packed_rows: a row"):
        ops.gather_packed_rows(pack(torch.ones(32, 8)), torch.tensor([0, row]))


def test_a_weight_that_lost_bits_is_refused() -> None:
    packed = ops.pack_weight(torch.ones(32, 8), "int8")
    assert not packed.is_exact
    with pytest.raises(ValueError, match="int8 does not keep all bits"):
        ops._library("cpu").gather_packed_rows(packed.data, "int8", 32, 8, torch.tensor([0]), torch.empty(1, 8))


def test_an_output_of_another_dtype_is_refused() -> None:
    packed = pack(torch.ones(32, 8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="out must be bfloat16"):
        ops._library("cpu").gather_packed_rows(packed.data, "bfloat16", 32, 8, torch.tensor([0]), torch.empty(1, 8))
