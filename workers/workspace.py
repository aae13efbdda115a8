"""Memory for the tensors of a recording, used again as soon as a tensor is gone."""

from __future__ import annotations

import math
import weakref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 64


class Workspace:
    """Hands out tensors at fixed places of one buffer, the lowest that is free.

    A place is free again when the storage of its tensor is, views included.

    Args:
        num_bytes: the most that can be in use at a time. Pages that no tensor reaches are never touched.
    """

    def __init__(self, num_bytes: int) -> None:
        self._buffer: NDArray[np.uint8] = np.empty(num_bytes + _ALIGNMENT, np.uint8)
        self._origin = -self._buffer.ctypes.data % _ALIGNMENT
        self._end = num_bytes
        self._taken: dict[int, int] = {}  # begin -> end
        self.peak_bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor. Raises MemoryError when there is no room."""
        size = math.prod(shape) * dtype.itemsize
        begin = self._find(-(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT)
        place = self._buffer[self._origin + begin : self._origin + begin + size]
        weakref.finalize(place, self._taken.pop, begin, None)  # the tensor's storage holds the array
        return torch.from_numpy(place).view(dtype).view(shape)

    def _find(self, size: int) -> int:
        begin = 0
        for taken, end in sorted(self._taken.items()):
            if taken - begin >= size:
                break
            begin = end
        if begin + size > self._end:
            raise MemoryError(f"a workspace of {self._end} bytes is too small")
        self._taken[begin] = begin + size
        self.peak_bytes = max(self.peak_bytes, begin + size)
        return begin
