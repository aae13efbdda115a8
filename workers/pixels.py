"""Reads the pixels that vision workers leave in shared memory, or have sent over the bus."""

from __future__ import annotations

import math
import mmap
import os
from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from airside.proto.messages import PixelsParcel, PixelsRef, TensorRef

_SEGMENTS_MAX = 64  # mapped at once; vision workers come and go


class PixelsUnreadable(RuntimeError):
    """A reference that does not fit its segment or parcel, a segment that is gone, a parcel without its bytes."""


@dataclass(frozen=True, slots=True)
class _Segment:
    memory: mmap.mmap
    inode: int


class PixelArena:
    """Slabs that were sent here (`PixelsParcel`), and segments, mapped read-only when a plan first names them.

    The files are mapped directly: `multiprocessing.shared_memory` would register each with a resource tracker, which
    unlinks other processes' segments when this one ends.
    """

    def __init__(self, folder: Path = Path("/dev/shm")) -> None:
        self._folder = folder
        self._segments: OrderedDict[str, _Segment] = OrderedDict()
        self._parcels: dict[tuple[str, int], memoryview] = {}  # by segment and slab; not copied since they came

    def keep(self, parcel: PixelsParcel, frames: Sequence[memoryview]) -> None:
        """Keeps the bytes of a slab, in place of any that were there.

        Raises:
            PixelsUnreadable: `frames` are not one, of as many bytes as the message says.
        """
        sizes = [frame.nbytes for frame in frames]
        if sizes != [parcel.num_bytes]:
            raise PixelsUnreadable(
                f"slab {parcel.slab} of {parcel.segment} has {parcel.num_bytes} bytes, but came as frames of {sizes}"
            )
        self._parcels[parcel.segment, parcel.slab] = frames[0]

    def drop(self, segment: str, slab: int) -> None:
        """No plan names this slab any more; fine when it is not here."""
        self._parcels.pop((segment, slab), None)

    def read(self, pixels: PixelsRef, device: torch.device, names: Container[str] | None = None) -> dict[str, Tensor]:
        """Copies of one picture's tensors, by name: all, or those among `names`. Raises PixelsUnreadable."""
        memory, begin = self._find(pixels)
        if begin < 0 or begin + pixels.num_bytes > len(memory):
            raise PixelsUnreadable(f"slab {pixels.slab} of {pixels.num_bytes} bytes is outside {pixels.segment}")
        refs = [ref for ref in pixels.tensors if names is None or ref.name in names]
        return {ref.name: _read_tensor(memory, begin, pixels, ref).to(device) for ref in refs}

    def _find(self, pixels: PixelsRef) -> tuple[memoryview | mmap.mmap, int]:
        """Memory with the slab, and where it begins there."""
        parcel = self._parcels.get((pixels.segment, pixels.slab))
        return (self._map(pixels.segment), pixels.slab) if parcel is None else (parcel, 0)

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


def _read_tensor(memory: memoryview | mmap.mmap, begin: int, pixels: PixelsRef, ref: TensorRef) -> Tensor:
    dtype = np.dtype(ref.dtype)
    count = math.prod(ref.shape)  # in whole numbers, which do not wrap around
    if min(ref.shape, default=0) < 0 or ref.offset < 0 or ref.offset + count * dtype.itemsize > pixels.num_bytes:
        raise PixelsUnreadable(f"tensor {ref.name} of shape {ref.shape} is outside its slab in {pixels.segment}")
    view = np.frombuffer(memory, dtype, count, begin + ref.offset)
    return torch.from_numpy(view.reshape(ref.shape).copy())
