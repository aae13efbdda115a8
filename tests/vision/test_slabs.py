"""The slab allocator under random traffic, against a plain list of what is out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airside.vision_workers.slabs import ALIGNMENT, Slabs

START, END = 4096, 4096 + 40 * ALIGNMENT
STEPS = st.lists(st.one_of(st.integers(0, 12 * ALIGNMENT), st.integers(0, 50).map(lambda at: -1 - at)), max_size=80)


@given(STEPS)
def test_slabs_never_overlap_and_all_room_comes_back(steps: list[int]) -> None:
    """A step that is not negative allocates so many bytes; a negative one releases a slab that is out."""
    slabs = Slabs(START, END)
    out: list[tuple[int, int]] = []
    for step in steps:
        if step < 0 and out:
            slabs.release(out.pop(-step % len(out))[0])
        elif step >= 0 and slabs.can_allocate(step):
            offset = slabs.allocate(step)
            assert offset % ALIGNMENT == 0
            assert offset >= START
            assert offset + step <= END
            assert all(offset + max(step, 1) <= other or other + size <= offset for other, size in out)
            out.append((offset, max(step, 1)))
        slabs.check()
        assert slabs.num_taken == len(out)
        gaps = slabs.gaps(START, END)
        assert sum(end - begin for begin, end in gaps) + sum(slabs.size(offset) for offset, _ in out) == END - START
        assert not any(slabs.gaps(offset, offset + slabs.size(offset)) for offset, _ in out)
    for offset, _ in out:
        slabs.release(offset)
    assert slabs.can_allocate(slabs.bytes_total)
    assert slabs.bytes_total == END - START


def test_first_fit_reuses_the_lowest_gap() -> None:
    slabs = Slabs(0, 10 * ALIGNMENT)
    first, second, third = (slabs.allocate(2 * ALIGNMENT) for _ in range(3))
    slabs.release(first)
    assert slabs.allocate(ALIGNMENT) == first
    assert slabs.holds(second)
    assert slabs.holds(third)
    assert not slabs.holds(ALIGNMENT + 1)


def test_acting_without_asking_is_an_error() -> None:
    slabs = Slabs(0, 4 * ALIGNMENT)
    assert not slabs.can_allocate(4 * ALIGNMENT + 1)
    with pytest.raises(AssertionError):
        slabs.allocate(4 * ALIGNMENT + 1)
    with pytest.raises(AssertionError):
        slabs.release(0)
