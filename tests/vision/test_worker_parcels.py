"""The vision worker's loop where it shares no memory: pixels are attached, room is what was not released."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from airside.proto.channel import Link
from airside.proto.messages import ArenaFull, Credit, Drain, Goodbye, ImageFailed, Job, Pixels, Release, Shutdown
from airside.vision_workers import worker as worker_module
from airside.vision_workers.decode import decode
from airside.vision_workers.families.family import ImageShape
from airside.vision_workers.fetch.fetcher import Fetcher
from airside.vision_workers.header import ImageLimits
from airside.vision_workers.parcel_account import ParcelAccount
from airside.vision_workers.preparation import Preparation
from airside.vision_workers.worker import VisionWorker
from tests.vision.test_worker import png

LIMITS = ImageLimits(max_bytes=1 << 20, max_pixels=1_000_000, max_aspect=200.0)
SEGMENT = f"airside-vtest-{os.getpid()}-parcels"
PICTURE_BYTES = 64 * 64 * 3


class PlainFamily:
    """Tensors are the pixels themselves."""

    def shape(self, width: int, height: int) -> ImageShape:
        return ImageShape(np.array([width, height], dtype=np.int32))

    def process(self, image: Image.Image) -> dict[str, Any]:
        return {"pixels": np.asarray(image)}


@pytest.fixture
def running(endpoint: str, script: Any) -> Iterator[Future[None]]:
    """With room for two pictures of 64 x 64."""

    def run() -> None:
        family = PlainFamily()
        with (
            Preparation(lambda data: decode(data, LIMITS, "#ffffff"), family.process) as preparation,
            ParcelAccount(SEGMENT, 2 * PICTURE_BYTES) as account,
            closing(Link(endpoint, "vision-0")) as link,
        ):
            VisionWorker(link, family, account, preparation, LIMITS, Fetcher(None), "there").run()

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run)
        hello = script.greet()
        assert (hello.segment, hello.segment_bytes, hello.shares_memory) == (SEGMENT, 2 * PICTURE_BYTES, False)
        try:
            yield future
        finally:
            if not future.done():
                script.send(Shutdown(why="the test is over"))
            future.result(60)


def make(script: Any, seq_id: int, file: bytes) -> tuple[Pixels, list[bytes]]:
    """One picture from job to pixels, with what came behind them."""
    script.send(Job(seq_id, 0, 1), file)
    message, frames = script.next_with_files()
    assert isinstance(message, Pixels)
    assert message.seq_id == seq_id
    script.expect(Credit)
    return message, frames


@pytest.mark.usefixtures("running")
def test_pixels_are_attached(script: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(png(30, 20))
    pixels, (frame,) = make(script, 1, file.read_bytes())
    ref = pixels.pixels
    assert ref.segment == SEGMENT
    assert len(frame) == ref.num_bytes
    (tensor,) = ref.tensors
    shown = np.frombuffer(frame[tensor.offset :][: 30 * 20 * 3], tensor.dtype).reshape(tensor.shape)
    assert np.array_equal(shown, np.asarray(Image.open(file)))
    assert not Path("/dev/shm", SEGMENT).exists()


@pytest.mark.usefixtures("running")
def test_a_full_account_waits_for_a_release_and_says_so(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "ARENA_FULL_S", 0.02)
    (first, _), _ = make(script, 1, png()), make(script, 2, png())
    script.send(Job(3, 0, 1), png())
    for _ in range(2):
        assert script.expect(ArenaFull) == ArenaFull(PICTURE_BYTES)
    script.send(Release(slab=first.pixels.slab))
    while isinstance(message := script.next(), ArenaFull):
        pass
    assert isinstance(message, Pixels)
    assert message.pixels.slab == first.pixels.slab


@pytest.mark.usefixtures("running")
def test_a_picture_larger_than_the_account_fails(script: Any) -> None:
    script.send(Job(1, 0, 1), png(200, 200))
    failed = script.expect(ImageFailed)
    assert failed.cause == "arena_too_small"
    assert "vision.arena" in failed.detail


def test_it_leaves_when_all_is_released(script: Any, running: Future[None]) -> None:
    pixels, _ = make(script, 1, png())
    script.send(Drain())
    script.send(Release(slab=pixels.pixels.slab))
    script.expect(Goodbye)
    running.result(60)
