"""Reads the pixels that vision workers leave in shared memory."""

from __future__ import annotations

import math
import mmap
import os
from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from airside.proto.messages import PixelsRef, TensorRef

_SEGMENTS_MAX = 64  # mapped at once; vision workers come and go


class PixelsUnreadable(RuntimeError):
    """A reference that does not fit its segment, or a segment that is gone."""


@dataclass(frozen=True, slots=True)
class _Segment:
    memory: mmap.mmap
    inode: int


class PixelArena:
    """The arena's segments, mapped read-only when a plan first names them.

    The files are mapped directly: `multiprocessing.shared_memory` would register each with a resource tracker, which
    unlinks other processes' segments when this one ends.
    """

    def __init__(self, folder: Path = Path("/dev/shm")) -> None:
        self._folder = folder
        self._segments: OrderedDict[str, _Segment] = OrderedDict()

    def read(self, pixels: PixelsRef, device: torch.device, names: Container[str] | None = None) -> dict[str, Tensor]:
        """Copies of one picture's tensors, by name: all, or those among `names`. Raises PixelsUnreadable."""
        memory = self._map(pixels.segment)
        if pixels.slab < 0 or pixels.slab + pixels.num_bytes > len(memory):
            raise PixelsUnreadable(f"slab {pixels.slab} of {pixels.num_bytes} bytes is outside {pixels.segment}")
        refs = [ref for ref in pixels.tensors if names is None or ref.name in names]
        return {ref.name: _read_tensor(memory, pixels, ref).to(device) for ref in refs}

    def _map(self, name: str) -> mmap.mmap:
        path = self._folder / name
        known = self._segments.get(name)
        # A segment that has been unlinked stays readable; one made anew under the old name must be mapped again.
        if known is not None and _inode(path) in (known.inode, None):
            self._segments.move_to_end(name)
            return known.memory
        self._segments[name] = segment = _open_segment(path)
        self._segments.move_to_end(name)
        while len(self._segments) > _SEGMENTS_MAX:
            self._segments.popitem(last=False)
        return segment.memory


def _inode(path: Path) -> int | None:
    """None: there is no such file (any more). One call, since its owner may unlink it between two."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def _open_segment(path: Path) -> _Segment:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise PixelsUnreadable(f"segment {path.name} cannot be opened: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        return _Segment(mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ), status.st_ino)
    except (OSError, ValueError) as error:
        raise PixelsUnreadable(f"segment {path.name} cannot be mapped: {error}") from error
    finally:
        os.close(descriptor)


def _read_tensor(memory: mmap.mmap, pixels: PixelsRef, ref: TensorRef) -> Tensor:
    dtype = np.dtype(ref.dtype)
    count = math.prod(ref.shape)  # in whole numbers, which do not wrap around
    if min(ref.shape, default=0) < 0 or ref.offset < 0 or ref.offset + count * dtype.itemsize > pixels.num_bytes:
        raise PixelsUnreadable(f"tensor {ref.name} of shape {ref.shape} is outside its slab in {pixels.segment}")
    view = np.frombuffer(memory, dtype, count, pixels.slab + ref.offset)
    return torch.from_numpy(view.reshape(ref.shape).copy())
