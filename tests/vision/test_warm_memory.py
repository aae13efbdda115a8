"""Ranges that were given up and taken again, in any order, against a table of bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from airside.vision_workers.warm_memory import KEEP_S, WarmMemory

BYTES = 24
ranges = st.tuples(st.integers(0, BYTES), st.integers(0, BYTES)).map(lambda pair: (min(pair), max(pair)))


@given(st.lists(st.tuples(st.sampled_from(["add", "take", "pop"]), ranges, st.floats(0, KEEP_S))))
def test_each_byte_comes_out_once_it_was_unused_for_long_enough(
    steps: list[tuple[str, tuple[int, int], float]],
) -> None:
    warm, now = WarmMemory(), 0.0
    due: list[set[float]] = [set() for _ in range(BYTES)]
    for what, (begin, end), pause in steps:
        now += pause
        if what == "add":
            warm.add(begin, end, now)
            for byte in range(begin, end):
                due[byte].add(now + KEEP_S)
        elif what == "take":
            warm.take(begin, end)
            for byte in range(begin, end):
                due[byte].clear()
        else:
            out = {byte for first, last in warm.pop(now) for byte in range(first, last)}
            assert out == {byte for byte in range(BYTES) if any(time <= now for time in due[byte])}
            due = [{time for time in times if time > now} for times in due]
