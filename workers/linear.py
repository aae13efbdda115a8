"""Matrix products with a constant weight, such that a row's result does not depend on the rows beside it."""

from __future__ import annotations

from collections.abc import Callable

import torch
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
    return PackedLinear(ops.pack_weight(weight.contiguous(), weight_format or format_of(weight.dtype)), bias)


def format_of(dtype: torch.dtype) -> str:
    """The format of a packed weight that keeps that dtype."""
    return str(dtype).removeprefix("torch.")


class PackedLinear:
    """`make_linear` of a weight that is laid out already."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None = None) -> None:
        self.weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self._bias)
