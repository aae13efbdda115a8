"""How long the controller itself works for a step."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

WINDOW_STEPS = 512


class StepClock:
    """Adds up the pieces of work that belong to one step; waits are not among them."""

    def __init__(self) -> None:
        self._spent_s = 0.0
        self._steps: deque[float] = deque(maxlen=WINDOW_STEPS)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Counts the time spent inside towards the current step."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._spent_s += time.perf_counter() - start

    def end_step(self) -> None:
        """The step is over: what was counted so far belongs to it."""
        self._steps.append(self._spent_s)
        self._spent_s = 0.0

    @property
    def median_s(self) -> float:
        """Median over the last steps; 0 before the first."""
        return statistics.median(self._steps) if self._steps else 0.0
