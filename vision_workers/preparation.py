"""The thread that turns a picture's bytes into tensors, so that the loop can go on talking meanwhile."""

from __future__ import annotations

import functools
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from PIL import Image

from airside.vision_workers.courtesy import take_short_turns
from airside.vision_workers.image_error import ImageError, attempt
from airside.vision_workers.pixel_store import Tensors

_JOIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Prepared:
    """What became of one picture, and how long that took; None: nobody wanted it any more."""

    outcome: Tensors | ImageError | None
    decode_s: float = 0.0
    process_s: float = 0.0  # from upright RGB to tensors


@dataclass(slots=True, eq=False)
class Picture:
    """One picture on its way through the thread. The loop may take its wish back at any time, and then forgets it."""

    data: bytes
    at_work: Callable[[], AbstractContextManager[None]] = nullcontext  # entered for as long as the thread is at it
    process: Callable[[Image.Image], Tensors] | None = None  # in place of the usual
    is_wanted: bool = True
    prepared: Prepared | None = None

    def drop(self) -> None:
        """Nobody wants it any more. What it takes of memory goes as soon as the thread has no hand in it."""
        self.is_wanted = False
        self.data = b""


class Preparation:
    """Prepares pictures in the order they were started.

    Args:
        decode: a file's bytes to upright RGB.
        process: that to tensors. Whatever the two raise is a failure of that picture only.
    """

    def __init__(self, decode: Callable[[bytes], Image.Image], process: Callable[[Image.Image], Tensors]) -> None:
        self._decode = decode
        self._process = process
        self._started: queue.SimpleQueue[Picture | None] = queue.SimpleQueue()
        self._done: deque[Picture] = deque()
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Can be read from when a picture is done, until `take`."""
        # A daemon: a decoder that hangs must not keep the process from exiting.
        self._thread = threading.Thread(target=self._run, name="preparation", daemon=True)
        self._thread.start()

    def start(self, picture: Picture) -> None:
        """Begins with a picture's file once those before it are done, and returns at once."""
        self._started.put(picture)

    def take(self) -> list[Picture]:
        """The pictures that were done since the last call, in the order they were started."""
        try:
            os.eventfd_read(self.wake_fd)
        except BlockingIOError:
            return []
        return [self._done.popleft() for _ in range(len(self._done))]

    def close(self) -> None:
        """Waits for the picture in hand, but not for ever."""
        self._started.put(None)
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            os.close(self.wake_fd)

    def _run(self) -> None:
        take_short_turns()
        while self._prepare_next():
            pass

    def _prepare_next(self) -> bool:
        """False: there is to be no next one. Holds on to no picture while it waits for one."""
        picture = self._started.get()
        if picture is None:
            return False
        picture.prepared = self._prepare(picture)
        picture.data = b""
        self._done.append(picture)
        os.eventfd_write(self.wake_fd, 1)
        return True

    def _prepare(self, picture: Picture) -> Prepared:
        if not picture.is_wanted:
            return Prepared(None)
        with picture.at_work():
            return self._make(picture)

    def _make(self, picture: Picture) -> Prepared:
        """Looks between the two halves whether anybody still wants the picture: each may take long."""
        began = time.monotonic()
        decoded = attempt(functools.partial(self._decode, picture.data))
        decode_s = time.monotonic() - began
        if isinstance(decoded, ImageError) or not picture.is_wanted:
            return Prepared(decoded if isinstance(decoded, ImageError) else None, decode_s)
        began = time.monotonic()
        tensors = attempt(functools.partial(picture.process or self._process, decoded))
        return Prepared(tensors, decode_s, time.monotonic() - began)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
