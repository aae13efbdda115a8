"""Memory that was given up a moment ago: the next picture may want as much. Pure bookkeeping.

Taking pages from the system and giving them back takes longer than filling them with a picture's tensors.
"""

from __future__ import annotations

KEEP_S = 0.3
"""For so long it is kept. Most pictures take less to make, so that a busy worker goes on with the same memory."""

Range = tuple[int, int]
"""First byte, and the one behind the last."""


class WarmMemory:
    """Ranges of bytes, each with the time at which it has been unused for long enough."""

    def __init__(self) -> None:
        self._ranges: list[tuple[float, Range]] = []

    def add(self, begin: int, end: int, now: float) -> None:
        """Nobody uses these bytes from now on."""
        self._ranges.append((now + KEEP_S, (begin, end)))

    def take(self, begin: int, end: int) -> None:
        """These bytes are used again."""
        parts = [(due, part) for due, (b, e) in self._ranges for part in ((b, min(e, begin)), (max(b, end), e))]
        self._ranges = [(due, part) for due, part in parts if part[0] < part[1]]

    def pop(self, now: float) -> list[Range]:
        """The ranges that have been unused for long enough, once."""
        out = [part for due, part in self._ranges if due <= now]
        self._ranges = [(due, part) for due, part in self._ranges if due > now]
        return out
