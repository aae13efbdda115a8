"""The slabs of pixels that the controller holds: those in use, and those kept for the next equal picture. Pure.

take ──> in use ──last user gone──> idle ──found by content──> in use
            │                         │
            └── may not be shared ────┴── least recently used, room wanted ──> freed (goes back to its owner)
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from airside.controller.vision.pixel_jobs import KnownShape
from airside.proto.messages import PixelsRef

_SHARE = 2  # at most one part in so many of a segment is idle: the rest is for its worker to write to


@dataclass(slots=True, eq=False)
class Slab:
    """The pixels of one picture: in a vision worker's segment, or sent here."""

    ref: PixelsRef
    shape: KnownShape
    content: bytes  # equal for equal pictures; b"": not to be shared (any more)
    data: memoryview | None = None  # the bytes of the slab; None: they are in the segment
    users: int = 0  # images that are ready by it; one whose sequence has ended counts while a step reads it


class PixelCache:
    """All slabs of all segments.

    Methods that free slabs return them: they are forgotten here, and `Release` is due to their owner.

    Args:
        bytes_max: of idle slabs over all segments.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._slabs: dict[tuple[str, int], Slab] = {}  # by segment and offset
        self._by_content: dict[bytes, Slab] = {}
        self._idle: OrderedDict[tuple[str, int], Slab] = OrderedDict()  # the least recently used first
        self._leased: Counter[str] = Counter()  # bytes by segment, idle ones included
        self._idle_bytes: Counter[str] = Counter()  # by segment
        self._segments: dict[str, int] = {}  # sizes of those whose slabs may be kept

    def open(self, segment: str, num_bytes: int) -> None:
        """A segment whose slabs may be kept when they are idle."""
        self._segments[segment] = num_bytes

    def close(self, segment: str) -> list[Slab]:
        """Keeps none of a segment any more, and frees its idle slabs. Those in use can no longer be found."""
        self._segments.pop(segment, None)
        freed = [slab for slab in self._idle.values() if slab.ref.segment == segment]
        for slab in freed:
            self._forget(slab)
        for slab in self._slabs.values():
            if slab.ref.segment == segment:
                self._hide(slab)
        return freed

    def take(self, ref: PixelsRef, shape: KnownShape, content: bytes, data: memoryview | None = None) -> Slab:
        """A slab that a vision worker has handed over, without users yet. `holds(ref)` must be false."""
        assert not self.holds(ref), ref
        slab = Slab(ref, shape, content, data)
        self._slabs[_place(slab)] = slab
        self._leased[ref.segment] += ref.num_bytes
        if content and ref.segment in self._segments:
            assert content not in self._by_content, content
            self._by_content[content] = slab
        else:
            slab.content = b""
        return slab

    def find(self, content: bytes) -> Slab | None:
        """The slab with this content."""
        return self._by_content.get(content)

    def use(self, slab: Slab) -> None:
        """One more image is ready by this slab."""
        slab.users += 1
        if self._idle.pop(_place(slab), None) is not None:
            self._idle_bytes[slab.ref.segment] -= slab.ref.num_bytes

    def drop(self, slab: Slab, may_keep: bool) -> list[Slab]:
        """One image less. The last one leaves the slab idle, for which older ones may go; if it may be kept."""
        assert slab.users > 0, slab
        slab.users -= 1
        if slab.users:
            return []
        if not (slab.content and may_keep):
            self._forget(slab)
            return [slab]
        self._idle[_place(slab)] = slab
        self._idle_bytes[slab.ref.segment] += slab.ref.num_bytes
        segment = slab.ref.segment
        freed = self.make_room(segment, self._idle_bytes[segment] - self._segments[segment] // _SHARE)
        return freed + self._evict(self.idle_bytes - self._bytes_max, lambda _: True)

    def make_room(self, segment: str, num_bytes: int) -> list[Slab]:
        """Frees idle slabs of a segment, of at least so many bytes if there are as many."""
        return self._evict(num_bytes, lambda slab: slab.ref.segment == segment)

    def free_memory(self, num_bytes: int) -> list[Slab]:
        """The same of all segments, for a machine whose shared memory is full: what was sent here takes none."""
        return self._evict(num_bytes, lambda slab: slab.data is None)

    def holds(self, ref: PixelsRef) -> bool:
        """Whether a slab at this place is ours."""
        return (ref.segment, ref.slab) in self._slabs

    def is_leased(self, segment: str) -> bool:
        """Whether any slab of a segment is ours."""
        return any(name == segment for name, _ in self._slabs)

    def used_bytes(self, segment: str) -> int:
        """Of a segment: bytes of the slabs in use."""
        return self._leased[segment] - self._idle_bytes[segment]

    def has_idle(self, segment: str) -> bool:
        """Whether a segment has slabs that are kept though nobody uses them."""
        return self._idle_bytes[segment] > 0

    @property
    def num_used(self) -> int:
        """Slabs in use."""
        return len(self._slabs) - len(self._idle)

    def segments(self) -> set[str]:
        """Those that have slabs of ours."""
        return {segment for segment, _ in self._slabs}

    @property
    def idle_bytes(self) -> int:
        """Bytes of all idle slabs."""
        return self._idle_bytes.total()

    def _evict(self, num_bytes: int, may_go: Callable[[Slab], bool]) -> list[Slab]:
        """Frees the least recently used of those that may go, until `num_bytes` are free."""
        freed: list[Slab] = []
        for slab in self._idle.values():
            if num_bytes <= 0:
                break
            if may_go(slab):
                freed.append(slab)
                num_bytes -= slab.ref.num_bytes
        for slab in freed:
            self._forget(slab)
        return freed

    def _forget(self, slab: Slab) -> None:
        segment = slab.ref.segment
        self._hide(slab)
        del self._slabs[_place(slab)]
        if self._idle.pop(_place(slab), None) is not None:
            self._idle_bytes[segment] -= slab.ref.num_bytes
        self._leased[segment] -= slab.ref.num_bytes
        for counter in (self._leased, self._idle_bytes):
            if not counter[segment]:
                del counter[segment]

    def _hide(self, slab: Slab) -> None:
        if slab.content:
            del self._by_content[slab.content]
            slab.content = b""

    def check(self) -> None:
        """Asserts every invariant."""
        slabs, idle = self._slabs.values(), self._idle.values()
        assert all(self._slabs[place] is slab for place, slab in self._idle.items())
        assert all((slab.users == 0) == (_place(slab) in self._idle) for slab in slabs)
        assert all(slab.content for slab in idle)
        assert {slab.content for slab in slabs if slab.content} == set(self._by_content)
        assert +self._leased == _bytes_by_segment(list(slabs))
        assert +self._idle_bytes == _bytes_by_segment(list(idle))
        assert self.idle_bytes <= self._bytes_max
        assert all(self._idle_bytes[name] <= size // _SHARE for name, size in self._segments.items())


def _place(slab: Slab) -> tuple[str, int]:
    return slab.ref.segment, slab.ref.slab


def _bytes_by_segment(slabs: list[Slab]) -> Counter[str]:
    total: Counter[str] = Counter()
    for slab in slabs:
        total[slab.ref.segment] += slab.ref.num_bytes
    return total
