"""SIGINT and SIGTERM: once means in order, twice means now."""

from __future__ import annotations

import signal
from types import FrameType


class Stopped(Exception):
    """The server was told to stop while it was starting."""


class StopSignal:
    """Counts the signals of this process. `install` again after a library has put its own handlers in."""

    def __init__(self) -> None:
        self._count = 0

    def install(self) -> None:
        """Takes both signals over. Main thread only."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._count += 1

    @property
    def is_requested(self) -> bool:
        """Whether the server is to stop."""
        return self._count > 0

    @property
    def is_urgent(self) -> bool:
        """Whether it is to stop without waiting for anything."""
        return self._count > 1

    def check(self) -> None:
        """Raises Stopped when the server is to stop."""
        if self.is_requested:
            raise Stopped
