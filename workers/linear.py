"""Matrix products with a constant weight, such that a row's result does not depend on the rows beside it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

Linear = Callable[[Tensor], Tensor]
"""`x: [num_rows, in_features]` -> `[num_rows, out_features]`."""


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """`x @ weight.T + bias`, by the fastest way there is for the weight's device and dtype.

    Args:
        weight: [out_features, in_features].
        bias: [out_features].
    """
    if not _packs(weight):
        return lambda x: functional.linear(x, weight, bias)
    packed = _packed(weight, bias)
    return packed if _is_stable_alone(packed, weight) else _never_alone(packed)


def _packs(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    return weight.dtype is torch.float32 or (
        weight.dtype is torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def _packed(weight: Tensor, bias: Tensor | None) -> Linear:
    """oneDNN, with the weight laid out once for its kernels.

    torch's own linear would lay it out again on every call (bfloat16), or go to MKL (float32), whose order of summation
    depends on the number of rows.
    """
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 32)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda x: multiply(x, packed, bias, "none", [], "")


def _is_stable_alone(linear: Linear, weight: Tensor) -> bool:
    """Whether a single row is summed in the same order as two: it depends on the shape and on the threads."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((2, weight.shape[1]), generator=generator).to(weight.dtype)
    return torch.equal(linear(rows[:1]), linear(rows)[:1])


def _never_alone(linear: Linear) -> Linear:
    return lambda x: linear(x) if x.shape[0] > 1 else linear(functional.pad(x, (0, 0, 0, 1)))[:1]
