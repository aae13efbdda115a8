"""What loading a model takes, by its parts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

START_UP = "start-up by its parts: "
"""What a rank's log has before the parts of its start."""


class LoadTimes:
    """Seconds by phase, added up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs in the block belongs to it. Blocks of different phases do not overlap."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def __str__(self) -> str:
        return " ".join(f"{name}_s={seconds:.2f}" for name, seconds in self.seconds.items())
