"""The tensors of one vision worker's pictures, in one shared-memory segment that nobody else allocates from."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager

from airside.proto.messages import PixelsRef, TensorRef
from airside.proto.work_marks import JobKey, Work
from airside.vision_workers.pixel_store import PixelStore, Tensors, Written, as_bytes, slab_bytes, tensor_refs
from airside.vision_workers.segment import HEADER_BYTES, PAGE_BYTES, Segment
from airside.vision_workers.slabs import Slabs
from airside.vision_workers.warm_memory import WarmMemory


class Arena(PixelStore):
    """Owner's side. Readers map `/dev/shm/<segment>` read-only and follow a `PixelsRef`.

    Args:
        segment: name of the segment to make.
        num_bytes: size of the segment, of which memory is used only where slabs are.

    Raises:
        FileExistsError: the segment is there already.
        NoRoomForSegment: /dev/shm is full.
    """

    shares_memory = True

    def __init__(self, segment: str, num_bytes: int) -> None:
        super().__init__(segment, Slabs(HEADER_BYTES, num_bytes))
        self._segment = Segment(segment, num_bytes)
        self._warm = WarmMemory()

    def marked(self, work: Work, key: JobKey) -> AbstractContextManager[None]:
        """Meanwhile the segment says that this is being looked into, so that a death is blamed on it."""
        return self._segment.marked(work, key)

    def write_tensors(self, tensors: Tensors) -> Written:
        """Copies the tensors into a new slab, which stays until `release`. `can_write` must be true.

        Raises:
            OSError: the system has no memory left for /dev/shm; no slab is taken.
        """
        num_bytes = slab_bytes(tensors)
        slab = self._slabs.allocate(num_bytes)
        self._warm.take(slab, slab + self._slabs.size(slab))
        refs = tensor_refs(tensors)
        try:
            self._write(slab, tensors, refs)
        except OSError:
            self.release(slab)
            self._give_back(math.inf)  # nothing is kept from others that have no memory, either
            raise
        return Written(PixelsRef(segment=self.segment, slab=slab, num_bytes=num_bytes, tensors=refs))

    def _write(self, slab: int, tensors: Tensors, refs: list[TensorRef]) -> None:
        try:
            self._copy(slab, tensors, refs)
        except OSError:
            self._give_back(math.inf)  # it may be our own memory that is missing
            self._copy(slab, tensors, refs)

    def _copy(self, slab: int, tensors: Tensors, refs: list[TensorRef]) -> None:
        for ref in refs:
            self._segment.write(slab + ref.offset, as_bytes(tensors[ref.name]))

    def release(self, slab: int) -> None:
        """Takes a slab back. Its memory is kept for a moment, see `give_back`. `holds(slab)` must be true."""
        end = slab + self._slabs.size(slab)
        self._slabs.release(slab)
        self._warm.add(slab, end, time.monotonic())

    def give_back(self) -> None:
        """Gives the system the memory of slabs that came back a while ago and were not needed since."""
        self._give_back(time.monotonic())

    def _give_back(self, now: float) -> None:
        """Slabs share the pages at their ends: such a page goes with the last of them."""
        for begin, end in self._warm.pop(now):
            for gap_begin, gap_end in self._slabs.gaps(begin, end):
                self._segment.give_back(max(gap_begin, begin - PAGE_BYTES), min(gap_end, end + PAGE_BYTES))

    def close(self) -> None:
        """Removes the segment. A second call does nothing."""
        self._segment.close()
