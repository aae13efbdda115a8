"""`pack_weight` and `linear` with weights of the activations' dtype."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from airside.workers import ops
from airside.workers.packed_weight import PackedWeight

SIZES = [1, 3, 31, 33, 577]


def pack(weight: Tensor) -> PackedWeight:
    return ops.pack_weight(weight, str(weight.dtype).removeprefix("torch."))


def assert_product(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Within what float32 sums in any order and one rounding may lose."""
    wide, terms = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    if bias is not None:
        wide, terms = wide + bias.double(), terms + bias.double().abs()
    sums = terms * (x.shape[1] + 1) * 2.0**-24
    numbers = torch.finfo(x.dtype)
    rounding = numbers.eps * torch.maximum(wide.abs() + sums, torch.tensor(numbers.tiny)) / 2
    assert out.dtype == x.dtype
    assert ((out.double() - wide).abs() <= sums + rounding).all()


@pytest.mark.parametrize("out_features", SIZES)
@pytest.mark.parametrize("in_features", SIZES)
def test_is_the_product(dtype: torch.dtype, out_features: int, in_features: int) -> None:
    weight, bias = torch.randn(out_features, in_features, dtype=dtype), torch.randn(out_features, dtype=dtype)
    packed = pack(weight)
    for rows in (1, 2, 5, 13, 100):
        x = torch.randn(rows, in_features, dtype=dtype)
        assert_product(ops.linear(x, packed), x, weight)
        assert_product(ops.linear(x, packed, bias), x, weight, bias)


@pytest.mark.parametrize(("out_features", "in_features"), [(100, 8192), (3000, 576), (49, 2048)])
def test_is_the_product_of_larger_weights(dtype: torch.dtype, out_features: int, in_features: int) -> None:
    weight, x = torch.randn(out_features, in_features, dtype=dtype), torch.randn(200, in_features, dtype=dtype)
    assert_product(ops.linear(x, pack(weight)), x, weight)


@pytest.mark.parametrize(("out_features", "in_features"), [(577, 64), (96, 577), (960, 576)])
def test_a_row_is_the_same_alone_and_among_others(dtype: torch.dtype, out_features: int, in_features: int) -> None:
    packed, bias = pack(torch.randn(out_features, in_features, dtype=dtype)), torch.randn(out_features, dtype=dtype)
    x = torch.randn(200, in_features, dtype=dtype)
    alone = torch.cat([ops.linear(row[None], packed, bias) for row in x])
    assert torch.equal(ops.linear(x, packed, bias), alone)
    for rows in range(1, 41):
        assert torch.equal(ops.linear(x[7 : 7 + rows], packed, bias), alone[7 : 7 + rows])


def test_threads_change_no_bit(dtype: torch.dtype) -> None:
    packed, x = pack(torch.randn(960, 576, dtype=dtype)), torch.randn(50, 576, dtype=dtype)
    out, before = ops.linear(x, packed), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(ops.linear(x, packed), out)
    finally:
        torch.set_num_threads(before)


def test_the_bias_is_added_before_the_rounding() -> None:
    weight, x = torch.ones(1, 3, dtype=torch.bfloat16), torch.tensor([[256.0, 0.5, 0.5]], dtype=torch.bfloat16)
    out = ops.linear(x, pack(weight), torch.tensor([1.0], dtype=torch.bfloat16))
    assert out.item() == 258.0  # 257 alone would round to 256, and then 256 + 1 again


@pytest.mark.parametrize("in_features", [33, 64, 577])
def test_rows_may_be_strided(dtype: torch.dtype, in_features: int) -> None:
    fused, packed = torch.randn(30, 2 * in_features + 5, dtype=dtype), pack(torch.randn(70, in_features, dtype=dtype))
    x = fused[::2, 5 : 5 + in_features]
    assert torch.equal(ops.linear(x, packed), ops.linear(x.contiguous(), packed))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("in_features", [64, 65])
def test_nan_and_infinity_stay_in_their_row(dtype: torch.dtype, value: float, in_features: int) -> None:
    packed, x = pack(torch.randn(70, in_features, dtype=dtype)), torch.randn(20, in_features, dtype=dtype)
    clean = ops.linear(x, packed)
    x[3, -1] = value
    out = ops.linear(x, packed)
    assert not out[3].isfinite().any()
    others = torch.arange(20) != 3
    assert torch.equal(out[others], clean[others])


def test_nan_in_a_weight_stays_in_its_output(dtype: torch.dtype) -> None:
    weight, x = torch.randn(70, 65, dtype=dtype), torch.randn(20, 65, dtype=dtype)
    weight[69, 64] = torch.nan
    assert ops.linear(x, pack(weight)).isnan().any(0).nonzero().flatten().tolist() == [69]


def test_nothing_around_the_output_is_written(dtype: torch.dtype) -> None:
    packed, x = pack(torch.ones(33, 8, dtype=dtype)), torch.ones(13, 8, dtype=dtype)
    around = torch.full((15, 33), 7.0, dtype=dtype)
    ops._library("cpu").linear(x, packed.data, packed.format, 33, 8, None, around[1:14])
    assert (around[1:14] == 8).all()
    assert (around[[0, 14]] == 7).all()


@pytest.mark.parametrize(("rows", "out_features", "in_features"), [(0, 5, 8), (3, 0, 8), (3, 5, 0)])
def test_nothing_to_multiply(dtype: torch.dtype, rows: int, out_features: int, in_features: int) -> None:
    bias = torch.randn(out_features, dtype=dtype)
    out = ops.linear(
        torch.ones(rows, in_features, dtype=dtype), pack(torch.ones(out_features, in_features).to(dtype)), bias
    )
    assert out.shape == (rows, out_features)
    if in_features == 0:
        assert torch.equal(out, bias.expand(rows, -1))


@pytest.mark.parametrize(
    ("x", "bias", "says"),
    [
        (torch.ones(8), None, "x must have 2 dimensions"),
        (torch.ones(2, 7), None, r"x must be float32 \[2, 8\]"),
        (torch.ones(8, 2).T, None, "x must be .* with contiguous rows"),
        (torch.ones(2, 8).double(), None, "x must be float32, bfloat16 or float16"),
        (torch.ones(2, 8).bfloat16(), None, "x must be float32 as the weight's format is, got bfloat16"),
        (torch.ones(2, 8), torch.ones(4), r"bias must be float32 \[5\]"),
        (torch.ones(2, 8), torch.ones(5).half(), r"bias must be float32 \[5\]"),
    ],
)
def test_bad_arguments_are_named(x: Tensor, bias: Tensor | None, says: str) -> None:
    with pytest.raises(ValueError, match=f"linear: {says}"):
        ops.linear(x, pack(torch.ones(5, 8)), bias)


def test_bad_weights_are_named() -> None:
    with pytest.raises(ValueError, match="pack_weight: weight must be bfloat16 as the weight's format is"):
        ops.pack_weight(torch.ones(5, 8), "bfloat16")
    with pytest.raises(ValueError, match="there is no weight format float8"):
        ops.pack_weight(torch.ones(5, 8), "float8")
    with pytest.raises(ValueError, match=r"pack_weight: weight must be .* and contiguous"):
        ops.pack_weight(torch.ones(8, 5).T, "float32")
    packed = pack(torch.ones(5, 8))
    with pytest.raises(ValueError, match=r"linear: weight must be uint8 \[1024\]"):
        ops.linear(torch.ones(2, 8), PackedWeight(packed.data[:-64], "float32", 5, 8))
    shifted = torch.empty(1024 + 64, dtype=torch.uint8)[4 : 1024 + 4]
    with pytest.raises(ValueError, match="linear: weight must start at a multiple of 64"):
        ops.linear(torch.ones(2, 8), PackedWeight(shifted, "float32", 5, 8))
