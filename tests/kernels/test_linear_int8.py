"""`pack_weight` to "int8", and `linear` with it: integer sums are exact, so every result is told to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from airside.workers import ops

SIZES = [1, 3, 31, 33, 577]


def quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Multiples of a scale per row, to nearest with ties to even, in float64; and the scales, [num_rows, 1] float32."""
    wide = rows.float()
    scales = wide.abs().amax(1, keepdim=True) / 127
    return (wide / torch.where(scales > 0, scales, 1)).round().clamp(-127, 127).double(), scales


def quantized_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same of activations, which are multiplied by the scale's inverse."""
    wide = x.float()
    scales = wide.abs().amax(1, keepdim=True) / 127
    inverses = torch.where(scales >= torch.finfo(torch.float32).tiny, 1 / scales, 0)
    return (wide * inverses).round().clamp(-127, 127).double(), scales


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What the operator must return."""
    (x_values, x_scales), (values, scales) = quantized_rows(x), quantized(weight)
    out = (x_values @ values.T).float() * (x_scales * scales.T)
    return (out if bias is None else out + bias.float()).to(x.dtype)


@pytest.mark.parametrize("out_features", SIZES)
@pytest.mark.parametrize("in_features", SIZES)
def test_is_the_product_of_the_quantised(dtype: torch.dtype, out_features: int, in_features: int) -> None:
    weight, bias = torch.randn(out_features, in_features, dtype=dtype), torch.randn(out_features, dtype=dtype)
    packed = ops.pack_weight(weight, "int8")
    for rows in (1, 2, 5, 13, 100):
        x = torch.randn(rows, in_features, dtype=dtype)
        assert torch.equal(ops.linear(x, packed), product(x, weight))
        assert torch.equal(ops.linear(x, packed, bias), product(x, weight, bias))


@pytest.mark.parametrize(("out_features", "in_features"), [(40, 8192), (1000, 576)])
def test_larger_weights(out_features: int, in_features: int) -> None:
    weight, x = torch.randn(out_features, in_features), torch.randn(200, in_features)
    assert torch.equal(ops.linear(x, ops.pack_weight(weight, "int8")), product(x, weight))


def test_the_largest_sums_do_not_overflow() -> None:
    in_features = 1 << 17
    x, weight = torch.ones(2, in_features), torch.ones(3, in_features)
    weight[1] = -1
    out = ops.linear(x, ops.pack_weight(weight, "int8"))
    torch.testing.assert_close(out, torch.tensor([[1.0, -1.0, 1.0]]).expand(2, -1) * in_features)
    with pytest.raises(ValueError, match="pack_weight: in_features of int8 must be"):
        ops.pack_weight(torch.ones(1, in_features + 1), "int8")


def test_is_near_the_product_itself(dtype: torch.dtype) -> None:
    weight, x = torch.randn(576, 1536, dtype=dtype), torch.randn(20, 1536, dtype=dtype)
    exact = x.double() @ weight.double().T
    error = (ops.linear(x, ops.pack_weight(weight, "int8")).double() - exact).norm() / exact.norm()
    assert error < 0.016


@pytest.mark.parametrize(("out_features", "in_features"), [(577, 64), (96, 577), (960, 576)])
def test_a_row_is_the_same_alone_and_among_others(dtype: torch.dtype, out_features: int, in_features: int) -> None:
    weight, bias = torch.randn(out_features, in_features, dtype=dtype), torch.randn(out_features, dtype=dtype)
    packed, x = ops.pack_weight(weight, "int8"), torch.randn(200, in_features, dtype=dtype)
    alone = torch.cat([ops.linear(row[None], packed, bias) for row in x])
    assert torch.equal(ops.linear(x, packed, bias), alone)
    for rows in range(1, 41):
        assert torch.equal(ops.linear(x[7 : 7 + rows], packed, bias), alone[7 : 7 + rows])


def test_weights_of_a_dtype_of_their_own(dtype: torch.dtype) -> None:
    weight, x = torch.randn(40, 65), torch.randn(4, 65, dtype=dtype)
    assert torch.equal(ops.linear(x, ops.pack_weight(weight, "int8")), product(x, weight))


def test_rows_and_features_of_zeros(dtype: torch.dtype) -> None:
    weight, bias = torch.randn(40, 65, dtype=dtype), torch.randn(40, dtype=dtype)
    x = torch.randn(5, 65, dtype=dtype)
    weight[7], x[3] = 0, 0
    out = ops.linear(x, ops.pack_weight(weight, "int8"), bias)
    assert torch.equal(out, product(x, weight, bias))
    assert torch.equal(out[3], bias)
    assert (out[:, 7] == bias[7]).all()


@pytest.mark.parametrize("size", [1e-44, 1e-40, 1e-20, 1e18])
def test_rows_of_any_size(size: float) -> None:
    weight, x = torch.randn(40, 64), torch.randn(3, 64)
    x[1] *= size / x[1].abs().max()
    assert torch.equal(ops.linear(x, ops.pack_weight(weight, "int8")), product(x, weight))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("in_features", [64, 65])
def test_a_row_that_is_not_finite_is_nan_alone(dtype: torch.dtype, value: float, in_features: int) -> None:
    packed = ops.pack_weight(torch.randn(70, in_features, dtype=dtype), "int8")
    x = torch.randn(20, in_features, dtype=dtype)
    clean = ops.linear(x, packed)
    x[3, -1] = value
    out = ops.linear(x, packed)
    assert out[3].isnan().all()
    others = torch.arange(20) != 3
    assert torch.equal(out[others], clean[others])


def test_nan_in_a_weight_stays_in_its_output(dtype: torch.dtype) -> None:
    weight, x = torch.randn(70, 65, dtype=dtype), torch.randn(20, 65, dtype=dtype)
    weight[69, 64] = torch.nan
    out = ops.linear(x, ops.pack_weight(weight, "int8"))
    assert out.isnan().any(0).nonzero().flatten().tolist() == [69]


def test_rows_may_be_strided(dtype: torch.dtype) -> None:
    fused = torch.randn(30, 150, dtype=dtype)
    packed = ops.pack_weight(torch.randn(70, 33, dtype=dtype), "int8")
    x = fused[::2, 5:38]
    assert torch.equal(ops.linear(x, packed), ops.linear(x.contiguous(), packed))


@pytest.mark.parametrize(("rows", "out_features", "in_features"), [(0, 5, 8), (3, 0, 8), (3, 5, 0)])
def test_nothing_to_multiply(dtype: torch.dtype, rows: int, out_features: int, in_features: int) -> None:
    bias = torch.randn(out_features, dtype=dtype)
    packed = ops.pack_weight(torch.ones(out_features, in_features), "int8")
    out = ops.linear(torch.ones(rows, in_features, dtype=dtype), packed, bias)
    assert out.shape == (rows, out_features)
    if in_features == 0:
        assert torch.equal(out, bias.expand(rows, -1))


def test_half_the_bytes_of_bfloat16() -> None:
    weight = torch.ones(96, 576, dtype=torch.bfloat16)
    values, scales = 96 * 576, 96 * 4
    assert ops.pack_weight(weight, "int8").data.numel() == values + scales
