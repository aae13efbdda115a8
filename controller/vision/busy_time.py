"""Which share of their time vision workers have something in hand. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

SPAN_S = 30.0
"""The time that the share is of: some scrapes of Prometheus long, so that each scrape says what was between two."""

_MARK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class _Mark:
    at: float
    busy_s: float  # of all workers, since the beginning
    worker_s: float  # likewise, whether or not they had something to do


class BusyTime:
    """Adds up busy seconds and worker seconds. Told of every change; between two it is as it was."""

    def __init__(self, now: float) -> None:
        self._total = _Mark(now, 0.0, 0.0)
        self._marks = deque([self._total])  # the first is as old as the span, or older
        self._num_busy = self._num_workers = 0

    def note(self, now: float, num_busy: int, num_workers: int) -> None:
        """So many are there from now on, and so many of them have something in hand. The clock never goes back."""
        total, self._total = self._total, self._at(now)
        if total.at - self._marks[-1].at >= _MARK_EVERY_S:
            self._marks.append(total)
        while len(self._marks) > 1 and self._marks[1].at <= now - SPAN_S:
            self._marks.popleft()
        self._num_busy, self._num_workers = num_busy, num_workers

    def ratio(self, now: float) -> float:
        """From 0 to 1; 0 where there were no workers."""
        end = self._at(now)
        begin = self._begin(now - SPAN_S)
        worker_s = end.worker_s - begin.worker_s
        return (end.busy_s - begin.busy_s) / worker_s if worker_s > 0 else 0.0

    def _at(self, now: float) -> _Mark:
        passed_s = now - self._total.at
        return _Mark(
            now, self._total.busy_s + self._num_busy * passed_s, self._total.worker_s + self._num_workers * passed_s
        )

    def _begin(self, at: float) -> _Mark:
        """What it was at that time, between the marks around it."""
        marks = [mark for mark in (*self._marks, self._total) if mark.at <= at]
        if not marks:
            return self._marks[0]
        before = marks[-1]
        after = next((mark for mark in (*self._marks, self._total) if mark.at > at), None)
        if after is None:  # nothing has changed since then
            return self._at(at)
        share = (at - before.at) / (after.at - before.at)
        return _Mark(
            at,
            before.busy_s + share * (after.busy_s - before.busy_s),
            before.worker_s + share * (after.worker_s - before.worker_s),
        )
