"""Where the tensors of a vision worker's pictures are until they are released: the face of it, and what all have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from airside.proto.messages import PixelsRef, TensorRef
from airside.proto.work_marks import JobKey, Work
from airside.vision_workers.slabs import Slabs, aligned

Tensors = Mapping[str, NDArray[Any]]  # Any: each tensor has its own dtype
"""The tensors of one picture by name."""


@dataclass(frozen=True, slots=True)
class Written:
    """Tensors for which there was room: where they are, and what of them must travel with that word."""

    ref: PixelsRef
    frames: tuple[memoryview, ...] = ()


class PixelStore(ABC):
    """Keeps the books of one vision worker's slabs, which nobody else allocates.

    Args:
        segment: its name, which no other ever has.
        slabs: the room there is.
    """

    shares_memory: ClassVar[bool]
    """Whether the ranks find the tensors in a shared-memory segment of this name."""

    def __init__(self, segment: str, slabs: Slabs) -> None:
        self.segment = segment
        self._slabs = slabs

    @property
    def num_slabs(self) -> int:
        """Slabs that are out."""
        return self._slabs.num_taken

    @property
    def bytes_total(self) -> int:
        """The largest slab there can ever be."""
        return self._slabs.bytes_total

    def can_write(self, tensors: Tensors) -> bool:
        """Whether there is a gap for these tensors now."""
        return self._slabs.can_allocate(slab_bytes(tensors))

    def holds(self, slab: int) -> bool:
        """Whether the slab at this byte offset is out."""
        return self._slabs.holds(slab)

    @abstractmethod
    def marked(self, work: Work, key: JobKey) -> AbstractContextManager[None]:
        """Meanwhile it can be read, where that is possible, that this is being looked into."""

    @abstractmethod
    def write_tensors(self, tensors: Tensors) -> Written:
        """Puts the tensors into a new slab, which is out until `release`. `can_write` must be true.

        Raises:
            OSError: the system has no memory left for it; no slab is taken.
        """

    @abstractmethod
    def release(self, slab: int) -> None:
        """Takes a slab back. `holds(slab)` must be true."""

    @abstractmethod
    def give_back(self) -> None:
        """To be called several times a second: memory that is no longer needed goes back to the system."""

    @abstractmethod
    def close(self) -> None:
        """Leaves nothing behind. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def slab_bytes(tensors: Tensors) -> int:
    """Bytes of a slab for these tensors, each of which starts at a multiple of the alignment."""
    return sum(aligned(tensor.nbytes) for tensor in tensors.values())


def as_bytes(tensor: NDArray[Any]) -> memoryview:  # Any: of any dtype
    """What a tensor is in memory, in the order of its elements; a view, where it is contiguous."""
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data


def tensor_refs(tensors: Tensors) -> list[TensorRef]:
    """Where each of these tensors is in its slab: one after another."""
    refs, offset = [], 0
    for name, tensor in tensors.items():
        refs.append(TensorRef(name=name, dtype=tensor.dtype.name, shape=list(tensor.shape), offset=offset))
        offset += aligned(tensor.nbytes)
    return refs
