"""`gelu_tanh_and_mul`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu

from airside.workers import ops


def meaning(gate: Tensor, up: Tensor) -> Tensor:
    """In float64, without the difference to 1 that takes the digits of torch's where gelu is almost 0."""
    x = gate.double()
    return (x * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))).to(gate.dtype) * up


def test_the_meaning_is_torchs() -> None:
    gate = torch.linspace(-6, 6, 101, dtype=torch.float64)
    torch.testing.assert_close(meaning(gate, torch.ones(101)), gelu(gate, approximate="tanh"))


@pytest.mark.parametrize("width", [1, 9, 32, 100, 1536])
def test_is_gemmas_gate(dtype: torch.dtype, width: int) -> None:
    gate_up = torch.randn(3, 2 * width, dtype=dtype) * 4
    gate, up = gate_up.chunk(2, dim=-1)
    expected = meaning(gate, up)
    actual = ops.gelu_tanh_and_mul(gate_up)
    torch.testing.assert_close(actual, expected, rtol=max(2e-5, torch.finfo(dtype).eps), atol=1e-6)
    if dtype != torch.float32:
        assert (actual != expected).float().mean() < 0.01


def test_extremes_do_not_overflow() -> None:
    gate = torch.tensor([[-3e38, -1e4, -100.0, -0.0, 0.0, 100.0, 1e4, 3e38]])
    out = ops.gelu_tanh_and_mul(torch.cat([gate, torch.ones_like(gate)], dim=-1))
    torch.testing.assert_close(out, gate.clamp(min=0.0), atol=1e-35, rtol=0.0)
    assert ops.gelu_tanh_and_mul(torch.full((1, 2), torch.nan)).isnan().all()


def test_a_row_is_the_same_alone_and_in_a_batch(dtype: torch.dtype) -> None:
    gate_up = torch.randn(60, 2 * 576, dtype=dtype)
    together = ops.gelu_tanh_and_mul(gate_up)
    assert torch.equal(together, torch.cat([ops.gelu_tanh_and_mul(row[None]) for row in gate_up]))


def test_rows_may_be_strided() -> None:
    wide = torch.randn(4, 100)
    assert torch.equal(ops.gelu_tanh_and_mul(wide[:, 10:60]), ops.gelu_tanh_and_mul(wide[:, 10:60].contiguous()))
