"""Matrix products with a constant weight, such that a row's result does not depend on the rows beside it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from airside.workers import ops
from airside.workers.packed_weight import PackedWeight

ROWS_MIN = 4
"""Products of fewer rows are computed as one of so many."""

Linear = Callable[[Tensor], Tensor]
"""`x: [num_rows, in_features]` -> `[num_rows, out_features]`."""


def make_linear(weight: Tensor, bias: Tensor | None = None, weight_format: str | None = None) -> Linear:
    """`x @ weight.T + bias`, by the fastest way there is for the weight's device and dtype.

    Args:
        weight: [out_features, in_features].
        bias: [out_features].
        weight_format: what the weight is quantised to, as in `ops.pack_weight`; None: it keeps its dtype.
    """
    if weight_format is not None:
        return multiply_packed(ops.pack_weight(weight, weight_format), bias)
    return _packed(weight, bias) if _packs(weight) else lambda x: functional.linear(x, weight, bias)


def multiply_packed(weight: PackedWeight, bias: Tensor | None = None) -> Linear:
    """`make_linear` of a weight that is laid out already."""
    return lambda x: ops.linear(x, weight, bias)


def _packs(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    return weight.dtype is torch.float32 or (
        weight.dtype is torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def _packed(weight: Tensor, bias: Tensor | None) -> Linear:
    """oneDNN, with the weight laid out once for its kernels.

    torch's own linear would lay it out again on every call (bfloat16), or go to MKL (float32), whose order of summation
    depends on the number of rows. So does oneDNN's for a single row, and four rows are no slower than one: fewer are
    filled up to four.
    """
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 32)
    multiply: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise

    def linear(x: Tensor) -> Tensor:
        missing = ROWS_MIN - x.shape[0]
        if missing <= 0:
            return multiply(x, packed, bias, "none", [], "")
        return multiply(functional.pad(x, (0, 0, 0, missing)), packed, bias, "none", [], "")[:-missing]

    return linear
