"""Matrix products with a constant weight, such that a row's result does not depend on the rows beside it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from airside.workers import ops
from airside.workers.packed_weight import PackedWeight

Linear = Callable[[Tensor], Tensor]
"""`x: [num_rows, in_features]` -> `[num_rows, out_features]`."""


def make_linear(weight: Tensor, bias: Tensor | None = None, weight_format: str | None = None) -> Linear:
    """`x @ weight.T + bias`, by the kernels of Airside where the weight is on the CPU, else by torch.

    Args:
        weight: [out_features, in_features].
        bias: [out_features].
        weight_format: what the weight is quantised to, as in `ops.pack_weight`; None: it keeps its dtype.
    """
    if weight.device.type != "cpu":
        return lambda x: functional.linear(x, weight, bias)
    own_format = str(weight.dtype).removeprefix("torch.")
    return multiply_packed(ops.pack_weight(weight.contiguous(), weight_format or own_format), bias)


def multiply_packed(weight: PackedWeight, bias: Tensor | None = None) -> Linear:
    """`make_linear` of a weight that is laid out already."""
    return lambda x: ops.linear(x, weight, bias)
