"""First-fit allocation of slabs in a range of bytes. Pure bookkeeping: no memory is touched."""

from __future__ import annotations

import bisect

ALIGNMENT = 64  # a cache line, and more than any dtype needs


def aligned(num_bytes: int) -> int:
    """`num_bytes` rounded up to a whole number of alignment units."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Slabs:
    """Slabs between `start` and `end` (byte offsets).

        start                                           end
        | slab | free | slab | slab |       free        |

    `_free` lists (offset, num_bytes) of the gaps in order; no two of them touch. `_taken` maps offset to num_bytes.
    Both together cover the range exactly once; `check` says so.
    """

    def __init__(self, start: int, end: int) -> None:
        self._start = aligned(start)
        self._end = end // ALIGNMENT * ALIGNMENT
        assert self._start < self._end, f"no room between {start} and {end}"
        self._free = [(self._start, self._end - self._start)]
        self._taken: dict[int, int] = {}

    @property
    def num_taken(self) -> int:
        """Slabs that have not come back."""
        return len(self._taken)

    @property
    def bytes_total(self) -> int:
        """The largest slab that an empty range can hold."""
        return self._end - self._start

    def can_allocate(self, num_bytes: int) -> bool:
        """Whether one gap is large enough."""
        return any(size >= _slab_bytes(num_bytes) for _, size in self._free)

    def allocate(self, num_bytes: int) -> int:
        """Takes the first gap that is large enough; its offset. `can_allocate` must be true."""
        wanted = _slab_bytes(num_bytes)
        at = next((i for i, (_, size) in enumerate(self._free) if size >= wanted), None)
        assert at is not None, f"no gap of {wanted} bytes"
        offset, size = self._free[at]
        self._free[at : at + 1] = [(offset + wanted, size - wanted)] if size > wanted else []
        self._taken[offset] = wanted
        return offset

    def holds(self, offset: int) -> bool:
        """Whether a slab at this offset is out."""
        return offset in self._taken

    def size(self, offset: int) -> int:
        """Bytes of the slab at this offset. `holds(offset)` must be true."""
        return self._taken[offset]

    def gaps(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Begin and end of the gaps that have some of these bytes."""
        return [(at, at + size) for at, size in self._free if at < end and begin < at + size]

    def release(self, offset: int) -> None:
        """Takes a slab back and joins it with the gaps beside it. `holds(offset)` must be true."""
        assert offset in self._taken, f"no slab at {offset}"
        end = offset + self._taken.pop(offset)
        at = bisect.bisect(self._free, (offset, 0))
        first, last = at, at
        if at < len(self._free) and self._free[at][0] == end:
            end += self._free[at][1]
            last += 1
        if at > 0 and sum(self._free[at - 1]) == offset:
            offset = self._free[at - 1][0]
            first -= 1
        self._free[first:last] = [(offset, end - offset)]

    def check(self) -> None:
        """Raises AssertionError when slabs and gaps do not tile the range."""
        at, gap_before = self._start, False
        for offset, size, is_gap in sorted(
            [(*gap, True) for gap in self._free] + [(*slab, False) for slab in self._taken.items()]
        ):
            assert offset == at, f"expected a part at {at}, found {size} bytes at {offset}"
            assert size > 0, f"an empty part at {offset}"
            assert not (gap_before and is_gap), f"two gaps touch at {offset}"
            at, gap_before = offset + size, is_gap
        assert at == self._end, f"the parts end at {at}, not {self._end}"


def _slab_bytes(num_bytes: int) -> int:
    return aligned(max(num_bytes, 1))
