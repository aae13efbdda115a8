"""`silu_and_mul`."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from airside.workers import ops


@pytest.mark.parametrize("width", [1, 9, 32, 100, 1536])
def test_is_llamas_gate(dtype: torch.dtype, width: int) -> None:
    gate_up = torch.randn(3, 2 * width, dtype=dtype) * 4
    gate, up = gate_up.chunk(2, dim=-1)
    expected = silu(gate) * up
    actual = ops.silu_and_mul(gate_up)
    torch.testing.assert_close(actual, expected, rtol=max(2e-6, torch.finfo(dtype).eps), atol=1e-7)
    if dtype != torch.float32:
        assert (actual != expected).float().mean() < 0.01


def test_extremes_do_not_overflow() -> None:
    gate = torch.tensor([[-3e38, -1e4, -100.0, -0.0, 0.0, 100.0, 1e4, 3e38]])
    out = ops.silu_and_mul(torch.cat([gate, torch.ones_like(gate)], dim=-1))
    torch.testing.assert_close(out, gate.clamp(min=0.0), atol=1e-35, rtol=0.0)
    assert ops.silu_and_mul(torch.full((1, 2), torch.nan)).isnan().all()


def test_a_row_is_the_same_alone_and_in_a_batch(dtype: torch.dtype) -> None:
    gate_up = torch.randn(60, 2 * 576, dtype=dtype)
    together = ops.silu_and_mul(gate_up)
    assert torch.equal(together, torch.cat([ops.silu_and_mul(row[None]) for row in gate_up]))


def test_rows_may_be_strided() -> None:
    wide = torch.randn(4, 100)
    assert torch.equal(ops.silu_and_mul(wide[:, 10:60]), ops.silu_and_mul(wide[:, 10:60].contiguous()))


def test_no_rows() -> None:
    assert ops.silu_and_mul(torch.empty(0, 8)).shape == (0, 4)


def test_an_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match="silu_and_mul: gate_up"):
        ops.silu_and_mul(torch.ones(2, 7))
