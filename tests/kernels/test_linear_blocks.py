"""`pack_blocks`, and `linear` with the blocks of a GGUF tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from torch import Tensor

from airside.workers import ops
from airside.workers.packed_weight import PackedWeight

FORMATS = ["q8_0", "q4_0", "q4_1"]


@pytest.fixture(params=FORMATS)
def kind(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


def blocks_of(weight: Tensor, kind: str) -> tuple[PackedWeight, Tensor]:
    """The weight in blocks, and what they stand for in float64."""
    ggml = GGMLQuantizationType[kind.upper()]
    blocks = quantize(weight.float().numpy(), ggml)
    return ops.pack_blocks(torch.from_numpy(blocks), kind), torch.from_numpy(dequantize(blocks, ggml)).double()


def in_blocks(x: Tensor) -> Tensor:
    """x as multiples, to nearest, of a scale per 32 inputs."""
    wide = x.float().reshape(x.shape[0], -1, 32)
    scales = wide.abs().amax(2, keepdim=True) / 127
    values = (wide * torch.where(scales > 0, 1 / scales, 0)).round()
    return (values.double() * scales.double()).reshape(x.shape)


def assert_product(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Within what a chain of float32 sums over the blocks and one rounding may lose."""
    x = in_blocks(x)
    wide, terms = x @ weight.T, x.abs() @ weight.abs().T
    if bias is not None:
        wide, terms = wide + bias.double(), terms + bias.double().abs()
    sums = terms * (2 * x.shape[1] // 32 + 6) * 2.0**-23
    numbers = torch.finfo(out.dtype)
    rounding = numbers.eps * torch.maximum(wide.abs() + sums, torch.tensor(numbers.tiny)) / 2
    assert ((out.double() - wide).abs() <= sums + rounding).all()


@pytest.mark.parametrize("out_features", [1, 31, 33, 100])
@pytest.mark.parametrize("in_features", [32, 96, 576])
def test_is_the_product_of_the_quantised(dtype: torch.dtype, kind: str, out_features: int, in_features: int) -> None:
    packed, weight = blocks_of(torch.randn(out_features, in_features), kind)
    bias = torch.randn(out_features, dtype=dtype)
    for rows in (1, 2, 5, 13, 100):
        x = torch.randn(rows, in_features, dtype=dtype)
        assert_product(ops.linear(x, packed), x, weight)
        assert_product(ops.linear(x, packed, bias), x, weight, bias)


@pytest.mark.parametrize(("out_features", "in_features"), [(40, 8192), (1000, 576)])
def test_larger_weights(kind: str, out_features: int, in_features: int) -> None:
    packed, weight = blocks_of(torch.randn(out_features, in_features), kind)
    x = torch.randn(200, in_features)
    assert_product(ops.linear(x, packed), x, weight)


def test_every_value_of_a_block(kind: str) -> None:
    """Rows that pick one input each: every nibble or byte comes back at its place."""
    packed, weight = blocks_of(torch.randn(50, 96) * 3, kind)
    one_each = torch.eye(96) * 127
    torch.testing.assert_close(ops.linear(one_each, packed), (weight.T * 127).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "most"), [("q8_0", 0.012), ("q4_0", 0.12), ("q4_1", 0.1)])
def test_is_near_the_product_itself(dtype: torch.dtype, kind: str, most: float) -> None:
    original, x = torch.randn(576, 1536), torch.randn(20, 1536, dtype=dtype)
    packed, _ = blocks_of(original, kind)
    exact = x.double() @ original.double().T
    assert (ops.linear(x, packed).double() - exact).norm() / exact.norm() < most


@pytest.mark.parametrize(("out_features", "in_features"), [(577, 64), (96, 576)])
def test_a_row_is_the_same_alone_and_among_others(
    dtype: torch.dtype, kind: str, out_features: int, in_features: int
) -> None:
    packed, _ = blocks_of(torch.randn(out_features, in_features), kind)
    bias, x = torch.randn(out_features, dtype=dtype), torch.randn(100, in_features, dtype=dtype)
    alone = torch.cat([ops.linear(row[None], packed, bias) for row in x])
    assert torch.equal(ops.linear(x, packed, bias), alone)
    for rows in range(1, 21):
        assert torch.equal(ops.linear(x[7 : 7 + rows], packed, bias), alone[7 : 7 + rows])


def test_rows_of_zeros(dtype: torch.dtype, kind: str) -> None:
    packed, _ = blocks_of(torch.randn(40, 64), kind)
    bias = torch.randn(40, dtype=dtype)
    assert torch.equal(ops.linear(torch.zeros(3, 64, dtype=dtype), packed, bias), bias.expand(3, -1))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_is_nan_alone(dtype: torch.dtype, kind: str, value: float) -> None:
    packed, _ = blocks_of(torch.randn(70, 96), kind)
    x = torch.randn(20, 96, dtype=dtype)
    clean = ops.linear(x, packed)
    x[3, 40] = value
    out = ops.linear(x, packed)
    assert out[3].isnan().all()
    others = torch.arange(20) != 3
    assert torch.equal(out[others], clean[others])


def test_no_more_bytes_than_the_file(kind: str) -> None:
    packed, _ = blocks_of(torch.randn(96, 576), kind)
    assert packed.data.numel() == quantize(np.zeros((96, 576), np.float32), GGMLQuantizationType[kind.upper()]).size


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="pack_blocks: rows of 33 bytes are no blocks of q8_0"):
        ops.pack_blocks(torch.zeros(2, 33, dtype=torch.uint8), "q8_0")
    with pytest.raises(ValueError, match="weight format int8 has no blocks"):
        ops.pack_blocks(torch.zeros(2, 34, dtype=torch.uint8), "int8")
    with pytest.raises(ValueError, match="pack_weight: q8_0 is of blocks"):
        ops.pack_weight(torch.zeros(2, 32), "q8_0")
    packed = ops.pack_blocks(torch.zeros(2, 34, dtype=torch.uint8), "q8_0")
    with pytest.raises(ValueError, match="linear: in_features must be a multiple of 32, got 48"):
        ops.linear(torch.ones(1, 48), PackedWeight(packed.data, "q8_0", 2, 48))
