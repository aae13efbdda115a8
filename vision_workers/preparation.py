"""The thread that turns a picture's bytes into tensors, so that the loop can go on talking meanwhile."""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from airside.vision_workers.arena import Tensors
from airside.vision_workers.image_error import ImageError, attempt

_JOIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Prepared:
    """What became of one picture, and how long that took."""

    outcome: Tensors | ImageError
    process_s: float


class Preparation:
    """One picture at a time: the loop starts the next one when it has taken the last one's outcome.

    Args:
        prepare: the work, from a file's bytes to tensors. Whatever it raises is a failure of that picture only.
    """

    def __init__(self, prepare: Callable[[bytes], Tensors]) -> None:
        self._prepare = prepare
        self._files: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Prepared] = queue.SimpleQueue()
        # A daemon: a decoder that hangs must not keep the process from exiting.
        self._thread = threading.Thread(target=self._run, name="preparation", daemon=True)
        self._thread.start()

    def start(self, data: bytes) -> None:
        """Begins with a picture's file and returns at once."""
        self._files.put(data)

    def take(self) -> Prepared | None:
        """The outcome of the picture that was started, or None while it is not there yet."""
        try:
            return self._outcomes.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        """Waits for the picture in hand, but not for ever."""
        self._files.put(None)
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while (data := self._files.get()) is not None:
            began = time.monotonic()
            outcome = attempt(functools.partial(self._prepare, data))
            self._outcomes.put(Prepared(outcome, time.monotonic() - began))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
