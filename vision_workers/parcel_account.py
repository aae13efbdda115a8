"""What a vision worker that shares no memory with the ranks has sent them, and may still send."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from airside.proto.messages import PixelsRef
from airside.proto.work_marks import JobKey, Work
from airside.vision_workers.pixel_store import PixelStore, Tensors, Written, as_bytes, slab_bytes, tensor_refs
from airside.vision_workers.slabs import Slabs


class ParcelAccount(PixelStore):
    """Tensors are returned as one frame, to be sent behind `Pixels`, and not kept.

    The controller and the ranks hold them until `release`. So much of them there may be: the books are those of an
    arena, with the same word when it is full.

    Args:
        segment: names the slabs, in place of a segment.
        num_bytes: of slabs that may be out at a time.
    """

    shares_memory = False

    def __init__(self, segment: str, num_bytes: int) -> None:
        super().__init__(segment, Slabs(0, num_bytes))

    def marked(self, work: Work, key: JobKey) -> AbstractContextManager[None]:  # noqa: ARG002 - as the base has it
        """Nothing is said: there is no memory of it that outlives the process."""
        return nullcontext()

    def write_tensors(self, tensors: Tensors) -> Written:
        """Copies the tensors into a frame, laid out as a slab is. `can_write` must be true."""
        num_bytes, refs = slab_bytes(tensors), tensor_refs(tensors)
        frame = bytearray(num_bytes)
        for ref in refs:
            data = as_bytes(tensors[ref.name])
            frame[ref.offset : ref.offset + data.nbytes] = data
        slab = self._slabs.allocate(num_bytes)  # last: there may be no memory for the frame
        return Written(
            PixelsRef(segment=self.segment, slab=slab, num_bytes=num_bytes, tensors=refs), (memoryview(frame),)
        )

    def release(self, slab: int) -> None:
        """Takes a slab back: nobody holds it any more. `holds(slab)` must be true."""
        self._slabs.release(slab)

    def give_back(self) -> None:
        """Nothing: it keeps none."""

    def close(self) -> None:
        """Nothing: there is nothing to remove."""
