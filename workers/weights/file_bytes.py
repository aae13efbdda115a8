"""Values of a file, read to where they are to be."""

from __future__ import annotations

import os
from typing import cast

import torch
from torch import Tensor


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, as bytes that can be written."""
    return memoryview(cast("bytearray", tensor.view(-1).view(torch.uint8).numpy()))


def read_bytes(fd: int, out: Tensor, begin: int) -> None:
    """Fills a contiguous tensor on the CPU with what is there in the file. Raises EOFError when the file is shorter."""
    left = bytes_of(out) if out.numel() else memoryview(b"")
    while left:
        count = os.preadv(fd, [left], begin)
        if count == 0:
            raise EOFError(f"the file ends {len(left)} bytes before that")
        left, begin = left[count:], begin + count
