"""The weight of a linear layer as the kernels of its device read it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """What `ops.pack_weight` made, and `ops.linear` multiplies with.

    `data` is opaque to everybody else: bytes in the order in which a kernel reads them.
    """

    data: Tensor  # [num_bytes] uint8, 64-byte aligned
    format: str  # "float32", "bfloat16", "float16", "int8", "q8_0", "q4_0" or "q4_1"
    out_features: int
    in_features: int
