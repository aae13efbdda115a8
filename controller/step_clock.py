"""How long the controller itself works for a step, phase by phase."""

from __future__ import annotations

import statistics
import time
from collections import deque

WINDOW_STEPS = 512

PHASES = ("schedule", "build", "send", "apply", "reply")
"""Choosing rows; making the plan's message; giving messages to the sockets; taking in the result; making the messages
to the gateways, and letting go of what has ended."""

_WORK = ("schedule", "build", "apply", "reply")


class StepClock:
    """Adds up the pieces of work that belong to one step; waits are not among them.

    `start` begins a stretch of work, each `lap` ends a phase of it and begins the next.
    """

    def __init__(self) -> None:
        self._mark_s = 0.0
        self._spent_s = dict.fromkeys(PHASES, 0.0)
        self._steps: deque[dict[str, float]] = deque(maxlen=WINDOW_STEPS)

    def start(self) -> None:
        """What comes next is work."""
        self._mark_s = time.perf_counter()

    def lap(self, phase: str) -> None:
        """The time since the last `start` or `lap` was spent in this phase."""
        now = time.perf_counter()
        self._spent_s[phase] += now - self._mark_s
        self._mark_s = now

    def end_step(self) -> None:
        """The step is over: what was counted so far belongs to it."""
        self._steps.append(self._spent_s)
        self._spent_s = dict.fromkeys(PHASES, 0.0)

    @property
    def median_s(self) -> float:
        """Median of a step's work, without what the sockets take, over the last steps; 0 before the first."""
        return statistics.median(sum(step[phase] for phase in _WORK) for step in self._steps) if self._steps else 0.0

    def medians_s(self) -> dict[str, float]:
        """The same by phase; nothing before the first step."""
        return {phase: statistics.median(step[phase] for step in self._steps) for phase in PHASES if self._steps}
