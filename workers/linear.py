"""Matrix products with a constant weight, such that a row's result does not depend on the rows beside it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from airside.workers import ops

Linear = Callable[[Tensor], Tensor]
"""`x: [num_rows, in_features]` -> `[num_rows, out_features]`."""


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """`x @ weight.T + bias`, by the kernels of Airside where the weight is on the CPU, else by torch.

    Args:
        weight: [out_features, in_features].
        bias: [out_features].
    """
    if weight.device.type != "cpu":
        return lambda x: functional.linear(x, weight, bias)
    packed = ops.pack_weight(weight.contiguous(), str(weight.dtype).removeprefix("torch."))
    return lambda x: ops.linear(x, packed, bias)
