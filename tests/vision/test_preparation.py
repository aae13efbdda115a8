"""The thread that makes tensors, and what it keeps in memory: nothing beyond what somebody wants."""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from collections.abc import Callable
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


def policies(preparation: Preparation, pictures: int) -> list[int]:
    """The scheduling policy that the thread has for each of so many pictures."""
    seen = []
    for _ in range(pictures):
        preparation.start(Picture(b"file"))
        prepared = take(preparation).prepared
        assert prepared is not None
        assert isinstance(prepared.outcome, dict)
        seen.append(int(prepared.outcome["policy"][0]))
    return seen


def see_policy(_: Image.Image) -> dict[str, NDArray[Any]]:
    return {"policy": np.array([os.sched_getscheduler(0)])}


def test_pictures_are_made_when_nobody_else_wants_to_compute() -> None:
    before = os.sched_getscheduler(0)
    with Preparation(lambda _: Image.new("RGB", (8, 8)), see_policy) as preparation:
        assert policies(preparation, 3) == [os.SCHED_IDLE] * 3
    assert os.sched_getscheduler(0) == before  # and only they step back


def test_a_starved_thread_takes_its_share_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    starved = iter([False, True, False, False])
    monkeypatch.setattr(courtesy, "was_starved", lambda *_: next(starved))
    fair = os.sched_getscheduler(0)
    with Preparation(lambda _: Image.new("RGB", (8, 8)), see_policy) as preparation:
        assert policies(preparation, 4) == [os.SCHED_IDLE, os.SCHED_IDLE, fair, fair]


def test_a_share_is_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    starved = iter([True, False, False])
    monkeypatch.setattr(courtesy, "was_starved", lambda *_: next(starved))
    monkeypatch.setattr(courtesy, "FAIR_S", 0.0)
    with Preparation(lambda _: Image.new("RGB", (8, 8)), see_policy) as preparation:
        assert policies(preparation, 3) == [os.SCHED_IDLE] * 3


@pytest.mark.parametrize(
    ("passed_s", "computed_s", "starved"),
    [(0.9, 0.0, False), (1.1, 0.2, False), (1.1, 0.1, True), (30.0, 3.1, False), (30.0, 2.9, True)],
)
def test_starved_is_who_hardly_ran_for_a_long_time(passed_s: float, computed_s: float, starved: bool) -> None:
    assert courtesy.was_starved(passed_s, computed_s) is starved
