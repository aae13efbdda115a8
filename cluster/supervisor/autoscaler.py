"""How many vision workers the load asks for. Pure: it is told loads and times, and says a number.

    need      workers that would bring the wait under the target, by one load
    lasting   the least need of the last upscale_delay_s: a wait that passes by itself starts no process
    wanted    the greatest lasting need of the last downscale_delay_s, within the bounds

So the number goes up as soon as a need has lasted, and down once less has been needed for long. It does not go down to
where the workers would be busy nearly all the time: they would fall behind, and it would go up and down for ever.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from airside.cluster.config.schema import AutoscalingBlock
from airside.proto.messages import VisionLoad

LOAD_EXPIRES_S = 5.0
"""Loads come twice a second. After a pause this long, what was heard before it is forgotten."""

BUSY_MAX = 0.8
"""Fewer workers would do only if they were busy for no more of their time."""

_ROUNDING = 1e-9  # of a worker


@dataclass(frozen=True, slots=True)
class Bounds:
    """The fewest and the most vision workers there may be; equal where the load decides nothing."""

    fewest: int
    most: int

    def clamp(self, replicas: int) -> int:
        """The nearest number within."""
        return max(self.fewest, min(replicas, self.most))


class Autoscaler:
    """Decides how many vision workers there should be.

    Args:
        rules: the wait to stay under, and the delays.
        bounds: at first; `ask` changes them. It begins with the fewest.
    """

    def __init__(self, rules: AutoscalingBlock, bounds: Bounds) -> None:
        self._rules = rules
        self._bounds = bounds
        self._wanted = bounds.fewest
        self._history: _History | None = None

    @property
    def bounds(self) -> Bounds:
        """What the load decides within."""
        return self._bounds

    @property
    def wanted(self) -> int:
        """How many there should be. It changes in `ask` and `hear` alone."""
        return self._wanted

    def ask(self, bounds: Bounds) -> None:
        """Someone asked for this. A number that is within stays until the load says something else, from now on."""
        self._bounds = bounds
        self._wanted = bounds.clamp(self._wanted)
        self.restart()

    def restart(self) -> None:
        """Forgets the loads so far, not the number: the controller that told them is gone."""
        self._history = None

    def hear(self, load: VisionLoad, now: float) -> None:
        """Takes in the newest load. `now` is of a clock that never goes back."""
        busy = min(load.in_hand, load.workers)
        if self._history is None or now - self._history.heard_at > LOAD_EXPIRES_S:
            self._history = _History(self._rules, self._wanted, busy, now)
        is_used = load.queued + load.in_hand + load.done > 0
        lasting = self._history.add(self._need(load), is_used, busy, now)
        self._wanted = self._bounds.clamp(max(lasting, min(self._wanted, self._history.busy_enough(now))))

    def _need(self, load: VisionLoad) -> int:
        """Workers that would bring the wait under the target. More than there are pictures would have nothing to do.

        While workers are still starting, the wait does not say whether they will do.
        """
        most = self._bounds.most if load.workers >= self._wanted else self._wanted
        most = min(most, load.queued + load.in_hand)
        work_s = load.wait_s * max(1, load.workers)
        return math.ceil(min(work_s * 1000 / self._rules.target_media_wait_ms, most) - _ROUNDING)


class _History:
    """What was heard since it began, when `wanted` was the number of workers."""

    def __init__(self, rules: AutoscalingBlock, wanted: int, busy: int, now: float) -> None:
        self.heard_at = now
        self._need = _Steps(rules.upscale_delay_s, wanted, now)
        self._lasting = _Steps(rules.downscale_delay_s, wanted, now)
        self._busy = _Steps(rules.downscale_delay_s, busy, now)

    def add(self, need: int, is_used: bool, busy: int, now: float) -> int:
        """Takes in one load; returns the greatest lasting need. The first worker has to be there for any picture."""
        self.heard_at = now
        self._need.add(need, now)
        self._lasting.add(max(min(self._need.values()), int(is_used)), now)
        self._busy.add(busy, now)
        return max(self._lasting.values())

    def busy_enough(self, now: float) -> int:
        """The fewest workers that could have done the work and not been busy all the time."""
        return math.ceil(self._busy.mean(now) / BUSY_MAX - _ROUNDING)


class _Steps:
    """A number that changes now and then, over the last `span_s`.

    The first entry holds at the beginning of the span: it may be older, and the second one is not.
    """

    def __init__(self, span_s: float, value: int, now: float) -> None:
        self._span_s = span_s
        self._entries = deque([(now, value)])  # since when, and what

    def add(self, value: int, now: float) -> None:
        if value != self._entries[-1][1]:
            self._entries.append((now, value))
        while len(self._entries) > 1 and self._entries[1][0] <= now - self._span_s:
            self._entries.popleft()

    def values(self) -> list[int]:
        return [value for _, value in self._entries]

    def mean(self, now: float) -> float:
        """Over the part of the span that is known; the last value when that is a moment."""
        begin = max(self._entries[0][0], now - self._span_s)
        if now <= begin:
            return self._entries[-1][1]
        spans = pairwise([*self._entries, (now, 0)])
        return sum(value * (until - max(since, begin)) for (since, value), (until, _) in spans) / (now - begin)
