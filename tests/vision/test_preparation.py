"""The thread that makes tensors, and what it keeps in memory: nothing beyond what somebody wants."""

from __future__ import annotations

import os
import platform
import select
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from airside.vision_workers import courtesy
from airside.vision_workers.preparation import Picture, Preparation

PATIENCE_S = 60.0


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def take(preparation: Preparation) -> Picture:
    """The next picture that is done."""
    assert select.select([preparation.wake_fd], [], [], PATIENCE_S)[0]
    (picture,) = preparation.take()
    return picture


def test_an_idle_thread_keeps_nothing_of_the_last_picture() -> None:
    made: list[weakref.ref[Any]] = []

    def process(image: Image.Image) -> dict[str, NDArray[Any]]:
        tensor = np.asarray(image).copy()
        made.extend([weakref.ref(image), weakref.ref(tensor)])
        return {"pixels": tensor}

    with Preparation(lambda _: Image.new("RGB", (8, 8)), process) as preparation:
        preparation.start(Picture(b"file"))
        picture = take(preparation)
        assert picture.prepared is not None
        assert isinstance(picture.prepared.outcome, dict)
        assert picture.data == b""
        del picture
        wait_until(lambda: not any(kept() is not None for kept in made))
    assert len(made) == 2


def test_a_picture_dropped_while_it_is_decoded_goes_no_further() -> None:
    begun, may_end = threading.Event(), threading.Event()
    decoded: list[weakref.ref[Image.Image]] = []

    def decode(_: bytes) -> Image.Image:
        begun.set()
        assert may_end.wait(PATIENCE_S)
        image = Image.new("RGB", (8, 8))
        decoded.append(weakref.ref(image))
        return image

    def process(_: Image.Image) -> dict[str, NDArray[Any]]:
        raise AssertionError("nobody wants it")

    with Preparation(decode, process) as preparation:
        current, next_one = Picture(b"file"), Picture(b"another")
        preparation.start(current)
        preparation.start(next_one)
        assert begun.wait(PATIENCE_S)
        for picture in (current, next_one):
            picture.drop()
            assert picture.data == b""  # what waits holds no file
        may_end.set()
        wait_until(lambda: next_one.prepared is not None)
        assert [picture.prepared and picture.prepared.outcome for picture in (current, next_one)] == [None, None]
        wait_until(lambda: decoded[0]() is None)
    assert len(decoded) == 1


def test_pictures_are_made_in_short_turns_and_no_less_nicely() -> None:
    """Linux shows a turn's length from 6.12 on, and only then is there anything to ask for."""
    seen: list[tuple[int, list[str]]] = []

    def process(_: Image.Image) -> dict[str, NDArray[Any]]:
        lines = Path("/proc/thread-self/sched").read_text().splitlines()
        seen.append((os.getpriority(os.PRIO_PROCESS, 0), [line.split()[-1] for line in lines if "se.slice" in line]))
        return {}

    with Preparation(lambda _: Image.new("RGB", (8, 8)), process) as preparation:
        preparation.start(Picture(b"file"))
        take(preparation)
    [(nice, turns)] = seen
    assert nice == os.getpriority(os.PRIO_PROCESS, 0)
    assert turns in ([], [str(courtesy.TURN_NS)])


def test_a_system_without_short_turns_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "abacus")
    assert not courtesy.take_short_turns()
