"""`rms_norm` and `add_rms_norm`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from airside.workers import ops

EPS = 1e-5


def meaning(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * normalised.to(x.dtype)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """The sums' order may move a value across a rounding boundary, but hardly ever does."""
    torch.testing.assert_close(actual, expected, rtol=max(2e-6, torch.finfo(actual.dtype).eps), atol=1e-6)
    if actual.dtype != torch.float32:
        assert (actual != expected).float().mean() < 0.01


@pytest.mark.parametrize("hidden", [1, 7, 16, 64, 100, 576, 1031])
def test_is_llamas_norm(dtype: torch.dtype, hidden: int) -> None:
    x, weight = torch.randn(5, hidden, dtype=dtype) * 3, torch.randn(hidden, dtype=dtype)
    assert_same(ops.rms_norm(x, weight, EPS), meaning(x, weight))


def test_add_writes_the_rounded_sum_and_norms_it(dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(6, 100, dtype=dtype), torch.randn(6, 100, dtype=dtype), torch.randn(100).to(dtype)
    expected_sum = x + residual
    out = ops.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(residual, expected_sum)
    assert_same(out, meaning(expected_sum, weight))


def test_a_row_is_the_same_alone_and_in_a_batch(dtype: torch.dtype) -> None:
    x, weight = torch.randn(200, 576, dtype=dtype), torch.randn(576, dtype=dtype)
    together = ops.rms_norm(x, weight, EPS)
    assert torch.equal(together, torch.cat([ops.rms_norm(row[None], weight, EPS) for row in x]))


def test_rows_may_be_strided(dtype: torch.dtype) -> None:
    fused, weight = torch.randn(4, 300, dtype=dtype), torch.randn(100, dtype=dtype)
    x = fused[:, 100:200]
    assert torch.equal(ops.rms_norm(x, weight, EPS), ops.rms_norm(x.contiguous(), weight, EPS))


def test_no_rows() -> None:
    assert ops.rms_norm(torch.empty(0, 8), torch.ones(8), EPS).shape == (0, 8)


def test_nan_stays_in_its_row() -> None:
    x = torch.randn(3, 40)
    x[1, 7] = torch.nan
    out = ops.rms_norm(x, torch.ones(40), EPS)
    assert out.isnan().all(-1).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("x", "weight", "says"),
    [
        (torch.ones(8), torch.ones(8), "x must have 2 dimensions"),
        (torch.ones(2, 8), torch.ones(7), r"weight must be float32 \[8\]"),
        (torch.ones(2, 8), torch.ones(8).bfloat16(), r"weight must be float32 \[8\]"),
        (torch.ones(2, 8).double(), torch.ones(8), "x must be float32, bfloat16 or float16"),
        (torch.ones(8, 2).T, torch.ones(8), "x must be .* with contiguous rows"),
    ],
)
def test_bad_arguments_are_named(x: Tensor, weight: Tensor, says: str) -> None:
    with pytest.raises(ValueError, match=f"rms_norm: {says}"):
        ops.rms_norm(x, weight, EPS)


def test_a_residual_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="add_rms_norm: residual"):
        ops.add_rms_norm(torch.ones(2, 8), torch.ones(1, 8), torch.ones(8), EPS)


def zero_centred_meaning(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (normalised * (1.0 + weight.float())).to(x.dtype)


@pytest.mark.parametrize("hidden", [1, 7, 100, 1031])
def test_a_zero_centred_norm_is_gemmas(dtype: torch.dtype, hidden: int) -> None:
    x, weight = torch.randn(5, hidden, dtype=dtype) * 3, torch.randn(hidden, dtype=dtype)
    assert_same(ops.rms_norm(x, weight, EPS, zero_centred=True), zero_centred_meaning(x, weight))
    residual = torch.randn(5, hidden, dtype=dtype)
    expected_sum = x + residual
    out = ops.add_rms_norm(x, residual, weight, EPS, zero_centred=True)
    assert torch.equal(residual, expected_sum)
    assert_same(out, zero_centred_meaning(expected_sum, weight))
