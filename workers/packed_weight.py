"""The weight of a linear layer as the kernels of its device read it."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
SLAB_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """What `ops.pack_weight` made, and `ops.linear` multiplies with.

    `data` is opaque to everybody else: bytes in the order in which a kernel reads them.
    """

    data: Tensor  # [num_bytes] uint8, 64-byte aligned
    format: str  # "float32", "bfloat16", "float16", "int8", "q8_0", "q4_0" or "q4_1"
    out_features: int
    in_features: int

    @property
    def is_exact(self) -> bool:
        """Whether it has all bits of what it was made of."""
        return self.format in ("float32", "bfloat16", "float16")


class WeightMemory:
    """Memory for packed weights, one behind the other in huge pages: they are read from end to end at every step, and
    with pages of 4 KiB that is an eighth slower.

    A slab is given back when none of its weights is left.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)  # what is left of the newest slab

    def take(self, num_bytes: int) -> Tensor:
        """Returns: [num_bytes] uint8 on the CPU, 64-byte aligned, not initialised."""
        rounded = (num_bytes + 63) // 64 * 64
        if rounded > len(self._free):
            self._free = _slab(max(rounded, SLAB_BYTES))
        taken, self._free = self._free[:num_bytes], self._free[rounded:]
        return taken


def _slab(num_bytes: int) -> Tensor:
    """Returns: [>= num_bytes] uint8, aligned to a huge page; what is not written costs no memory."""
    mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    slab = torch.frombuffer(mapping, dtype=torch.uint8)
    return slab[-slab.data_ptr() % HUGE_PAGE :]
