"""Memory for the tensors of a recording, used again as soon as a tensor is gone."""

from __future__ import annotations

import math
import mmap
import sys
import weakref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 64
_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # the range counts as used where it is touched


class Workspace:
    """Hands out tensors at fixed places of one buffer, the lowest that is free.

    A place is free again when the storage of its tensor is, views included.

    Args:
        num_bytes: the most that can be in use at a time. Pages that no tensor reaches are never touched.
    Raises:
        MemoryError: there is no so large a range of addresses.
    """

    def __init__(self, num_bytes: int) -> None:
        try:
            pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        except OSError as error:
            raise MemoryError(f"a workspace of {num_bytes} bytes cannot be had: {error}") from error
        self._buffer: NDArray[np.uint8] = np.frombuffer(pages, np.uint8)
        self._end = num_bytes
        self._taken: dict[int, int] = {}  # begin -> end
        self.peak_bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor. Raises MemoryError when there is no room."""
        size = math.prod(shape) * dtype.itemsize
        begin = self._find(-(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT)
        place = self._buffer[begin : begin + size]
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
