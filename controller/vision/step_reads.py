"""Which sequences' pixels the steps in flight read. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class StepReads:
    """Steps in flight, oldest first, and of each the sequences that it reads pixels of."""

    def __init__(self) -> None:
        self._steps: deque[frozenset[int]] = deque()

    def begin(self, seq_ids: Iterable[int]) -> None:
        """A step is in flight."""
        self._steps.append(frozenset(seq_ids))

    def close(self) -> None:
        """The oldest step is done."""
        self._steps.popleft()

    def clear(self) -> None:
        """All are lost, and nobody reads for them any more."""
        self._steps.clear()

    def has(self, seq_id: int) -> bool:
        """Whether a step in flight reads this sequence's pixels."""
        return any(seq_id in step for step in self._steps)
