"""The share of their time that vision workers were busy, over the span just past."""

from __future__ import annotations

import pytest

from airside.controller.vision.busy_time import SPAN_S, BusyTime


def test_one_worker_that_was_busy_for_a_part() -> None:
    busy = BusyTime(100.0)
    busy.note(100.0, 0, 1)
    busy.note(104.0, 1, 1)
    busy.note(106.0, 0, 1)
    assert busy.ratio(108.0) == pytest.approx(2 / 8)


def test_workers_count_for_as_long_as_they_are_there() -> None:
    busy = BusyTime(0.0)
    busy.note(0.0, 1, 1)
    busy.note(4.0, 1, 3)
    assert busy.ratio(10.0) == pytest.approx(10 / (4 + 3 * 6))


def test_what_is_older_than_the_span_is_forgotten() -> None:
    busy = BusyTime(0.0)
    busy.note(0.0, 1, 1)
    busy.note(50.0, 0, 1)
    assert busy.ratio(50.0) == 1.0
    assert busy.ratio(50.0 + SPAN_S / 4) == pytest.approx(3 / 4)
    assert busy.ratio(50.0 + 10 * SPAN_S) == 0.0, "though nobody has said anything since"


def test_many_changes_within_the_span() -> None:
    """Each second 0.25 s of work, told in a thousand small pieces."""
    busy = BusyTime(0.0)
    for second in range(100):
        for piece in range(10):
            at = second + piece / 10
            busy.note(at, 1, 1)
            busy.note(at + 0.025, 0, 1)
    assert busy.ratio(100.0) == pytest.approx(0.25, rel=0.01)
    assert len(busy._marks) < 2 * SPAN_S


def test_nobody_is_not_busy() -> None:
    assert BusyTime(0.0).ratio(5.0) == 0.0
