"""The vision worker's loop against a scripted controller on a real bus; the model family is a fake with a gate."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from airside.proto.channel import Link
from airside.proto.image_content import PixelRange, content_hash
from airside.proto.messages import (
    ArenaFull,
    Cancel,
    Credit,
    Drain,
    Fetched,
    Goodbye,
    Heartbeat,
    ImageFailed,
    Job,
    KvSetup,
    Pixels,
    Probe,
    Release,
    Shape,
    Shutdown,
)
from airside.proto.work_marks import read_marks
from airside.vision_workers import worker as worker_module
from airside.vision_workers.arena import Arena
from airside.vision_workers.decode import decode
from airside.vision_workers.families.family import ImageShape
from airside.vision_workers.fetch.fetcher import Fetched as Fetch
from airside.vision_workers.fetch.fetcher import Fetcher
from airside.vision_workers.header import ImageLimits
from airside.vision_workers.preparation import Preparation
from airside.vision_workers.worker import VisionWorker

IMAGES = Path(__file__).parent / "images"
LIMITS = ImageLimits(max_bytes=1 << 20, max_pixels=1_000_000, max_aspect=200.0)
SEGMENT = f"airside-vtest-{os.getpid()}-loop"
ARENA_BYTES = 4096 + 3 * 64 * 64 * 2  # two pictures of 64 x 64


class GatedFamily:
    """Tensors are the pixels themselves; `process` waits while the gate is shut."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Event()
        self.num_processed = 0

    def shape(self, width: int, height: int) -> ImageShape:
        return ImageShape(np.array([width, height], dtype=np.int32), rope_advance=7)

    def process(self, image: Image.Image) -> dict[str, NDArray[Any]]:
        self.started.set()
        self.num_processed += 1
        assert self.gate.wait(60)
        if image.size == (13, 13):
            raise RuntimeError("an unlucky picture")
        return {"pixels": np.asarray(image)}


@pytest.fixture
def family() -> GatedFamily:
    return GatedFamily()


@pytest.fixture
def running(endpoint: str, script: Any, family: GatedFamily) -> Iterator[Future[None]]:
    """The loop in a thread; the test must bring it to its end."""

    def decode_file(data: bytes) -> Image.Image:
        return decode(data, LIMITS, "#ffffff")

    def run() -> None:
        with Preparation(decode_file, family.process) as preparation, Arena(SEGMENT, ARENA_BYTES) as arena:
            link = Link(endpoint, "vision-0")
            try:
                VisionWorker(link, family, arena, preparation, LIMITS, Fetcher(None), "here").run()
            finally:
                link.close()

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run)
        hello = script.greet()
        assert (hello.segment, hello.pid, hello.node) == (SEGMENT, os.getpid(), "here")
        assert hello.segment_bytes == ARENA_BYTES - 4096
        try:
            yield future
        finally:
            family.gate.set()
            if not future.done():
                script.send(Shutdown(why="the test is over"))
            future.result(60)


def png(width: int = 64, height: int = 64) -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


def job(seq_id: int, epoch: int = 1) -> Job:
    return Job(seq_id=seq_id, image_index=2, epoch=epoch)


def probe(seq_id: int, url: str = "") -> Probe:
    return Probe(seq_id=seq_id, image_index=2, epoch=1, url=url)


def deliver(script: Any, seq_id: int) -> Pixels:
    """One picture of 64 x 64 from job to pixels, which stay in the arena."""
    script.send(job(seq_id), png())
    pixels: Pixels = script.expect(Pixels)
    assert pixels.seq_id == seq_id
    script.expect(Credit)
    return pixels


@pytest.mark.usefixtures("running")
def test_a_probe_is_answered_from_the_header_and_costs_no_credit(script: Any) -> None:
    script.send(Probe(seq_id=7, image_index=2, epoch=3), png(30, 20))
    shape = script.expect(Shape)
    assert (shape.seq_id, shape.image_index, shape.epoch) == (7, 2, 3)
    assert (shape.width, shape.height, shape.rope_advance) == (30, 20, 7)
    assert np.frombuffer(shape.expansion, "<i4").tolist() == [30, 20]
    script.send(probe(8), (IMAGES / "html_as.jpg").read_bytes())
    failed = script.expect(ImageFailed)
    assert (failed.seq_id, failed.image_index, failed.epoch, failed.cause) == (8, 2, 1, "unsupported_format")
    deliver(script, 9)  # no credit came before


@pytest.mark.usefixtures("running")
def test_a_job_becomes_pixels_then_credit(script: Any) -> None:
    data = png(30, 20)
    script.send(job(7, epoch=3), data)
    pixels = script.expect(Pixels)
    assert (pixels.seq_id, pixels.image_index, pixels.epoch) == (7, 2, 3)
    assert min(pixels.decode_s, pixels.process_s) > 0
    (tensor,) = pixels.pixels.tensors
    raw = np.memmap(Path("/dev/shm") / SEGMENT, mode="r")[pixels.pixels.slab + tensor.offset :]
    shown = raw[: 30 * 20 * 3].view(tensor.dtype).reshape(tensor.shape)
    assert np.array_equal(shown, np.asarray(Image.open(io.BytesIO(data))))
    assert script.expect(Credit).jobs == 1


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize(("file", "cause"), [("trunc_half.jpg", "truncated"), ("html_as.jpg", "unsupported_format")])
def test_a_bad_picture_fails_alone(script: Any, file: str, cause: str) -> None:
    script.send(job(1), (IMAGES / file).read_bytes())
    failed = script.expect(ImageFailed)
    assert (failed.seq_id, failed.image_index, failed.epoch, failed.cause) == (1, 2, 1, cause)
    assert failed.detail
    script.expect(Credit)
    deliver(script, 2)


@pytest.mark.usefixtures("running")
def test_an_unexpected_error_fails_one_picture(script: Any, caplog: pytest.LogCaptureFixture) -> None:
    script.send(job(1), png(13, 13))
    assert script.expect(ImageFailed).cause == "internal"
    assert "an unlucky picture" in caplog.text
    script.expect(Credit)
    deliver(script, 2)


@pytest.mark.usefixtures("running")
def test_a_job_without_bytes_fails(script: Any) -> None:
    script.send(job(1))
    assert script.expect(ImageFailed).cause == "empty"
    script.expect(Credit)


@pytest.mark.usefixtures("running")
def test_a_picture_larger_than_the_arena_fails(script: Any) -> None:
    script.send(job(1), png(200, 200))
    assert script.expect(ImageFailed).cause == "arena_too_small"
    script.expect(Credit)


def no_space(*_: object) -> int:
    raise OSError(errno.ENOSPC, "full")


@pytest.mark.usefixtures("running")
def test_a_picture_waits_while_the_machine_has_no_memory(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", no_space)
        script.send(job(1), png())
        for _ in range(3):
            assert script.expect(ArenaFull) == ArenaFull(64 * 64 * 3, is_memory_full=True)
    while isinstance(message := script.next(), ArenaFull):
        pass
    assert isinstance(message, Pixels)
    script.expect(Credit)


@pytest.mark.usefixtures("running")
def test_a_picture_for_which_the_machine_has_no_memory_for_long_fails_alone(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "MEMORY_FULL_MAX_S", 0.2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", no_space)
        script.send(job(1), png())
        assert script.expect(ArenaFull).is_memory_full
        while isinstance(failed := script.next(), ArenaFull):
            pass
    assert isinstance(failed, ImageFailed)
    assert failed.cause == "memory_full"
    assert "/dev/shm" in failed.detail
    assert "vision.arena" in failed.detail
    script.expect(Credit)
    deliver(script, 2)


@pytest.mark.usefixtures("running")
def test_the_loop_talks_while_a_picture_is_prepared(
    script: Any, family: GatedFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "HEARTBEAT_S", 0.05)
    family.gate.clear()
    script.send(job(1), png())
    assert family.started.wait(60)
    for _ in range(3):
        heartbeat = script.next(heartbeats=True)
        assert isinstance(heartbeat, Heartbeat)
        assert heartbeat.rss_bytes > 1 << 20
    script.send(probe(2), png(10, 10))
    assert script.expect(Shape).seq_id == 2
    family.gate.set()
    assert script.expect(Pixels).seq_id == 1


@pytest.mark.usefixtures("running")
def test_the_segment_says_what_is_being_looked_into(
    script: Any, family: GatedFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs that wait are not; so a death is blamed on the one that is at work."""
    seen: list[object] = []

    def shape(width: int, height: int) -> ImageShape:
        seen.append(read_marks(SEGMENT))
        return ImageShape(np.array([width, height], dtype=np.int32))

    monkeypatch.setattr(family, "shape", shape)
    assert read_marks(SEGMENT) == set()
    family.gate.clear()
    for seq_id in (1, 2):
        script.send(job(seq_id, epoch=3), png())
    assert family.started.wait(60)
    script.send(probe(4), png())
    script.expect(Shape)
    assert seen == [{(1, 2, 3), (4, 2, 1)}]
    assert read_marks(SEGMENT) == {(1, 2, 3)}
    family.gate.set()
    for _ in range(2):
        script.expect(Pixels)
        script.expect(Credit)
    assert read_marks(SEGMENT) == set()


@pytest.mark.usefixtures("running")
def test_a_busy_worker_tells_its_memory_too(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "HEARTBEAT_S", 0.05)
    heartbeats = 0
    for seq_id in range(1000):
        script.send(job(seq_id), png(10, 10))
        while not isinstance(message := script.next(heartbeats=True), Credit):
            heartbeats += isinstance(message, Heartbeat)
            if isinstance(message, Pixels):
                script.send(Release(slab=message.pixels.slab))
        if heartbeats >= 3:
            return
    raise AssertionError(f"1000 pictures, and {heartbeats} heartbeats")


@pytest.mark.usefixtures("running")
def test_several_small_jobs_are_taken_at_once_and_done_in_order(script: Any) -> None:
    for seq_id in (1, 2, 3, 4):
        script.send(job(seq_id), png(8, 8))
    for seq_id in (1, 2, 3, 4):
        assert script.expect(Pixels).seq_id == seq_id
        assert script.expect(Credit).jobs == 1


@pytest.mark.usefixtures("running")
def test_cancel_ends_queued_and_current_jobs(script: Any, family: GatedFamily) -> None:
    family.gate.clear()
    for seq_id in (1, 2, 3, 4):
        script.send(job(seq_id), png())
    assert family.started.wait(60)
    script.send(Cancel(seq_id=1, image_index=2, epoch=1))
    script.send(Cancel(seq_id=2, image_index=2, epoch=1))
    script.send(Cancel(seq_id=3, image_index=2, epoch=1))
    script.send(Cancel(seq_id=4, image_index=2, epoch=9))  # another attempt: not this job
    script.send(probe(9), png(10, 10))
    script.expect(Shape)  # nothing came before: each ends in its turn, also the one that the thread does not have yet
    family.gate.set()
    for _ in range(3):
        script.expect(Credit)
    assert script.expect(Pixels).seq_id == 4
    script.expect(Credit)
    assert family.num_processed == 2  # those that nobody wanted were not begun with
    script.send(Cancel(seq_id=4, image_index=2, epoch=1))  # done already: harmless
    deliver(script, 5)


@pytest.mark.usefixtures("running")
def test_a_full_arena_waits_for_a_release_and_says_so(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "ARENA_FULL_S", 0.02)
    first, _ = deliver(script, 1), deliver(script, 2)
    script.send(job(3), png())
    assert script.expect(ArenaFull).num_bytes == 64 * 64 * 3
    script.expect(ArenaFull)  # again, as long as it waits
    script.send(probe(4), png(10, 10))
    while isinstance(message := script.next(), ArenaFull):
        pass
    assert isinstance(message, Shape)  # the loop listens meanwhile
    script.send(Release(slab=first.pixels.slab))
    while isinstance(message := script.next(), ArenaFull):
        pass
    assert isinstance(message, Pixels)
    assert message.pixels.slab == first.pixels.slab
    script.expect(Credit)


@pytest.mark.usefixtures("running")
def test_a_small_picture_does_not_pass_one_that_waits_for_room(script: Any) -> None:
    first, second = deliver(script, 1), deliver(script, 2)
    script.send(job(3), png())
    script.expect(ArenaFull)
    script.send(job(4), png(8, 8))
    for slab in (first.pixels.slab, second.pixels.slab):
        script.send(Release(slab=slab))
    heard: list[Any] = []
    while len(heard) < 4:
        message = script.next()
        if not isinstance(message, ArenaFull):
            heard.append(message)
    assert [message.seq_id for message in heard if not isinstance(message, Credit)] == [3, 4]


@pytest.mark.usefixtures("running")
def test_cancel_frees_the_worker_from_a_full_arena(script: Any) -> None:
    first, _ = deliver(script, 1), deliver(script, 2)
    script.send(job(3), png())
    script.expect(ArenaFull)
    script.send(Cancel(seq_id=3, image_index=2, epoch=1))
    while isinstance(message := script.next(), ArenaFull):
        pass
    assert isinstance(message, Credit)
    script.send(Release(slab=first.pixels.slab))
    deliver(script, 4)


def test_drain_waits_for_the_slabs(script: Any, running: Future[None], family: GatedFamily) -> None:
    first = deliver(script, 1)
    family.gate.clear()
    script.send(job(2), png())
    script.send(Drain())
    script.send(Release(slab=first.pixels.slab))
    family.gate.set()
    second = script.expect(Pixels)  # the job in hand is finished
    script.expect(Credit)  # so the controller knows that nothing is in hand, though it is to give nothing more
    assert not running.done()
    script.send(Release(slab=second.pixels.slab))
    script.expect(Goodbye)
    running.result(60)


@pytest.mark.usefixtures("running")
def test_a_range_of_pixels_is_refused_by_a_family_that_has_one_way(script: Any) -> None:
    for message in (dataclasses.replace(probe(1), max_pixels=9), dataclasses.replace(job(2), min_pixels=9)):
        script.send(message, png())
        assert script.expect(ImageFailed).cause == "bad_pixel_range"
    script.expect(Credit)
    deliver(script, 3)


@pytest.mark.usefixtures("running")
def test_each_picture_is_scaled_to_its_own_range(script: Any, family: GatedFamily) -> None:
    def within(pixels: PixelRange) -> GatedFamily:
        scaled = GatedFamily()
        scaled.shape = lambda *_: ImageShape(np.array(pixels, np.int32))  # type: ignore[method-assign]
        scaled.process = lambda _: {"pixels": np.full(5, pixels.max_pixels)}  # type: ignore[method-assign]
        return scaled

    family.within = within  # type: ignore[attr-defined]
    script.send(dataclasses.replace(probe(1), min_pixels=3, max_pixels=9), png())
    assert script.expect(Shape).expansion == np.array([3, 9], np.int32).tobytes()
    script.send(dataclasses.replace(job(1), min_pixels=3, max_pixels=9), png())
    assert script.expect(Pixels).pixels.tensors[0].shape == [5]
    script.expect(Credit)
    assert deliver(script, 2).pixels.tensors[0].shape == [64, 64, 3]


@pytest.mark.usefixtures("running")
def test_a_fetched_file_goes_to_the_controller_unread(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be anything; its header is read when the controller asks for that, and so knows what is being read."""
    done: list[Fetch] = []
    monkeypatch.setattr(Fetcher, "start", lambda _, key, url: done.append(Fetch(key, url.encode(), 0.5)))
    monkeypatch.setattr(Fetcher, "take", lambda _: [done.pop() for _ in range(len(done))])
    script.send(probe(1, "no picture at all"), b"")
    fetched, (file,) = script.next_with_files()
    assert fetched == Fetched(1, 2, 1, content_hash(b"no picture at all"), 0.5)
    assert file == b"no picture at all"


@pytest.mark.usefixtures("running")
def test_a_url_is_refused_where_nothing_may_be_fetched(script: Any) -> None:
    script.send(probe(1, "http://example.org/a.png"), b"")
    assert script.expect(ImageFailed).cause == "not_allowed"
    deliver(script, 2)


@pytest.mark.usefixtures("running")
def test_messages_that_make_no_sense_change_nothing(script: Any, caplog: pytest.LogCaptureFixture) -> None:
    script.send(KvSetup(num_blocks=1))
    script.send(Release(slab=12345))
    script.send(Cancel(seq_id=99, image_index=0, epoch=0))
    deliver(script, 1)
    assert "KvSetup" in caplog.text
    assert "12345" in caplog.text


def test_shutdown_ends_the_loop(script: Any, running: Future[None]) -> None:
    script.send(Shutdown(why="enough"))
    running.result(60)


def test_the_loop_ends_with_its_parent(running: Future[None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 1)
    running.result(60)
