"""The tensors of one vision worker's pictures, in one shared-memory segment that nobody else allocates from."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from airside.proto.messages import PixelsRef, TensorRef
from airside.proto.work_marks import JobKey, Work
from airside.vision_workers.segment import HEADER_BYTES, PAGE_BYTES, Segment
from airside.vision_workers.slabs import Slabs, aligned

Tensors = Mapping[str, NDArray[Any]]  # Any: each tensor has its own dtype
"""The tensors of one picture by name."""


class Arena:
    """Owner's side. Readers map `/dev/shm/<segment>` read-only and follow a `PixelsRef`.

    Args:
        segment: name of the segment to make.
        num_bytes: size of the segment, of which memory is used only where slabs are.

    Raises:
        FileExistsError: the segment is there already.
        NoRoomForSegment: /dev/shm is full.
    """

    def __init__(self, segment: str, num_bytes: int) -> None:
        self._segment = Segment(segment, num_bytes)
        self._slabs = Slabs(HEADER_BYTES, num_bytes)

    @property
    def segment(self) -> str:
        """The segment's name."""
        return self._segment.name

    @property
    def num_slabs(self) -> int:
        """Slabs that are out."""
        return self._slabs.num_taken

    @property
    def bytes_total(self) -> int:
        """The largest slab there can ever be."""
        return self._slabs.bytes_total

    def marked(self, work: Work, key: JobKey) -> AbstractContextManager[None]:
        """Meanwhile the segment says that this is being looked into, so that a death is blamed on it."""
        return self._segment.marked(work, key)

    def can_write(self, tensors: Tensors) -> bool:
        """Whether there is a gap for these tensors now."""
        return self._slabs.can_allocate(slab_bytes(tensors))

    def write_tensors(self, tensors: Tensors) -> PixelsRef:
        """Copies the tensors into a new slab, which stays until `release`. `can_write` must be true.

        Raises:
            OSError: the system has no memory left for /dev/shm; no slab is taken.
        """
        num_bytes = slab_bytes(tensors)
        slab = self._slabs.allocate(num_bytes)
        try:
            refs = self._write(slab, tensors)
        except OSError:
            self.release(slab)
            raise
        return PixelsRef(segment=self.segment, slab=slab, num_bytes=num_bytes, tensors=refs)

    def _write(self, slab: int, tensors: Tensors) -> list[TensorRef]:
        refs, offset = [], 0
        for name, tensor in tensors.items():
            contiguous = np.ascontiguousarray(tensor)
            self._segment.write(slab + offset, contiguous.reshape(-1).view(np.uint8).data)
            refs.append(TensorRef(name=name, dtype=tensor.dtype.name, shape=list(tensor.shape), offset=offset))
            offset += aligned(tensor.nbytes)
        return refs

    def holds(self, slab: int) -> bool:
        """Whether the slab at this byte offset of the segment is out."""
        return self._slabs.holds(slab)

    def release(self, slab: int) -> None:
        """Takes a slab back, and gives its memory back to the system. `holds(slab)` must be true.

        Slabs share the pages at their ends: such a page goes with the last of them.
        """
        end = slab + self._slabs.size(slab)
        gap_begin, gap_end = self._slabs.release(slab)
        self._segment.give_back(max(gap_begin, slab - PAGE_BYTES), min(gap_end, end + PAGE_BYTES))

    def close(self) -> None:
        """Removes the segment. A second call does nothing."""
        self._segment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def slab_bytes(tensors: Tensors) -> int:
    """Bytes of a slab for these tensors, each of which starts at a multiple of the alignment."""
    return sum(aligned(tensor.nbytes) for tensor in tensors.values())
