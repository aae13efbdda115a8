"""Which vision workers start and go next, for there to be as many as wanted. Pure: the pool does what `decide` says."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum, auto

RESTART_DELAY_MAX_S = 30.0
PROVEN_S = 10.0
"""A worker that ran this long was no failed start, whoever has heard of it."""

SHORT_LIFE_DELAY_S = 0.5
"""Before the next start, when one that was up has ended sooner: pictures may be waiting, yet it may happen again."""


class State(Enum):
    """Of one vision worker."""

    STARTING = auto()
    UP = auto()
    DRAINING = auto()


@dataclass(frozen=True, slots=True)
class Start:
    """Start a vision worker with this number, which no other ever had."""

    number: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Let this one finish what it has in hand, and go."""

    number: int


class VisionScaling:
    """Keeps the pool at its target.

    Args:
        target: vision workers wanted at first.
        workers_max: the most there may be.
    """

    def __init__(self, target: int, workers_max: int) -> None:
        self._max = workers_max
        self._asked = target
        self._next_number = 0
        self._members: dict[int, tuple[State, float]] = {}  # number -> state, when it was started
        self._failures = 0  # starts in a row that came to nothing
        self._not_before = 0.0
        self._last_why = ""
        self.restarts: Counter[str] = Counter()
        """Workers that ended untold, for each of which another starts, by why: as in `messages.VisionPool`."""

    @property
    def target(self) -> int:
        """Vision workers wanted: what was asked for, within the maximum."""
        return min(self._asked, self._max)

    @property
    def notice(self) -> str:
        """Why the pool is smaller than was asked for, as far as it is known here."""
        if self._asked > self._max:
            return f"{self._asked} asked for, vision.autoscaling_config.max_replicas is {self._max}"
        if self._failures:
            return f"{self._failures} vision workers in a row failed to start: {self._last_why}"
        return ""

    @property
    def failures(self) -> int:
        """Starts in a row that came to nothing."""
        return self._failures

    def set_target(self, replicas: int) -> None:
        """So many are wanted from now on."""
        self._asked = replicas

    def retry(self) -> None:
        """Starts what is missing at once, although the last ones failed to start."""
        self._not_before = 0.0

    def is_draining(self, number: int) -> bool:
        """Whether this one was told to go."""
        return self._members[number][0] is State.DRAINING

    def joined(self, number: int) -> None:
        """This one is up: whatever kept others from it is over."""
        state, started_at = self._members[number]
        self._failures, self._not_before = 0, 0.0
        if state is State.STARTING:
            self._members[number] = State.UP, started_at

    def ended(self, number: int, why: str, now: float, has_hung: bool = False) -> None:
        """A vision worker is gone: as it was told to, or by accident, and then another takes its place."""
        state, started_at = self._members.pop(number)
        if state is State.DRAINING:
            return
        self._last_why = why
        is_proven = now - started_at >= PROVEN_S
        self.restarts["hung" if has_hung else "died" if is_proven or state is State.UP else "not_started"] += 1
        if is_proven:
            self._failures, self._not_before = 0, now
        elif state is State.UP:
            self._not_before = max(self._not_before, now + SHORT_LIFE_DELAY_S)
        else:
            self._failures += 1
            self._not_before = now + min(RESTART_DELAY_MAX_S, 2.0**self._failures)

    def killed(self, number: int) -> None:
        """This one was killed since the controller has ended, and another is to take its place."""
        state, _ = self._members.pop(number)
        self.restarts["with_the_controller"] += state is not State.DRAINING

    def decide(self, now: float) -> list[Start | Drain]:
        """What to do now to get to the target. It counts as done."""
        here = [number for number, (state, _) in self._members.items() if state is not State.DRAINING]
        newest = self._members.get(self._next_number - 1)
        if newest is not None and now - newest[1] >= PROVEN_S:
            self._failures = 0
        if len(here) > self.target:
            return [self._drain(number) for number in here[self.target - len(here) :]]
        if now < self._not_before:
            return []
        return [self._start(now) for _ in range(self.target - len(here))]

    def _start(self, now: float) -> Start:
        number = self._next_number
        self._next_number += 1
        self._members[number] = State.STARTING, now
        return Start(number)

    def _drain(self, number: int) -> Drain:
        self._members[number] = State.DRAINING, self._members[number][1]
        return Drain(number)
