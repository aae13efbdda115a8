"""Probes by URL, against the vision worker's loop on a real bus and a host on a real socket."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from airside.proto.channel import Envelope, Link
from airside.proto.image_content import PixelRange, content_hash
from airside.proto.messages import (
    Cancel,
    Credit,
    Drain,
    Fetched,
    Goodbye,
    Heartbeat,
    ImageFailed,
    Probe,
    Shape,
    Shutdown,
    VisionHello,
)
from airside.vision_workers.arena import Arena
from airside.vision_workers.decode import decode
from airside.vision_workers.families.family import ImageShape
from airside.vision_workers.fetch.download import FetchRules
from airside.vision_workers.fetch.fetcher import Fetcher
from airside.vision_workers.fetch.guard import AllowList
from airside.vision_workers.header import ImageLimits
from airside.vision_workers.preparation import Preparation
from airside.vision_workers.worker import VisionWorker
from tests.real_processes import wait_until
from tests.vision import picture_host
from tests.vision.picture_host import PictureHost, answer

PICTURE = (Path(__file__).parent / "images" / "control_rgb.png").read_bytes()
LIMITS = ImageLimits(max_bytes=1 << 20, max_pixels=1_000_000, max_aspect=200.0)
SEGMENT = f"airside-vtest-{os.getpid()}-fetch"


class SizeFamily:
    """Two tokens per picture: its width and height."""

    def shape(self, width: int, height: int) -> ImageShape:
        return ImageShape(np.array([width, height], dtype=np.int32))

    def process(self, image: Image.Image) -> dict[str, Any]:
        return {"pixels": np.asarray(image)}


@pytest.fixture
def host() -> Iterator[PictureHost]:
    routes = {"/ok": answer(PICTURE), "/slow": picture_host.drip_body}
    with PictureHost(routes) as running:
        yield running


@pytest.fixture
def running(endpoint: str, script: Any) -> Iterator[Future[None]]:
    rules = FetchRules(AllowList(["127.0.0.1"]), max_redirects=0, timeout_s=60.0, max_bytes=1 << 20)

    def run() -> None:
        family = SizeFamily()
        with (
            Preparation(lambda data: decode(data, LIMITS, "#ffffff"), family.process) as preparation,
            Arena(SEGMENT, 1 << 20) as arena,
            closing(Link(endpoint, "vision-0")) as link,
            closing(Fetcher(rules)) as fetcher,
        ):
            VisionWorker(link, family, arena, preparation, LIMITS, fetcher, "here").run()

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run)
        script.expect(VisionHello)
        script.expect(Credit)
        try:
            yield future
        finally:
            if not future.done():
                script.send(Shutdown(why="the test is over"))
            future.result(60)


def asked(host: PictureHost, path: str, seq_id: int, epoch: int = 1) -> Probe:
    return Probe(seq_id=seq_id, image_index=2, epoch=epoch, url=f"http://127.0.0.1:{host.port}{path}")


def next_envelope(script: Any) -> Envelope:
    """The next message with what is attached to it."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        for envelope in script.hub.receive(200):
            if not isinstance(envelope.message, Heartbeat):
                return envelope
    raise AssertionError("the worker says nothing")


@pytest.mark.usefixtures("running")
def test_a_fetched_file_is_attached(script: Any, host: PictureHost) -> None:
    script.send(asked(host, "/ok", 7, epoch=3))
    envelope = next_envelope(script)
    fetched = envelope.message
    assert isinstance(fetched, Fetched)
    assert (fetched.seq_id, fetched.image_index, fetched.epoch) == (7, 2, 3)
    assert fetched.content_hash == content_hash(PICTURE)
    assert fetched.fetch_s > 0
    assert [bytes(part) for part in envelope.attachments] == [PICTURE]


@pytest.mark.usefixtures("running")
def test_a_fetched_file_within_pixels_of_its_own_is_equal_to_such_alone(script: Any, host: PictureHost) -> None:
    script.send(dataclasses.replace(asked(host, "/ok", 7, epoch=1), max_pixels=9))
    fetched = next_envelope(script).message
    assert isinstance(fetched, Fetched)
    assert fetched.content_hash == content_hash(PICTURE, PixelRange(max_pixels=9)) != content_hash(PICTURE)


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize(
    ("url", "cause"),
    [
        ("http://127.0.0.1:{port}/none", "fetch_failed"),
        ("http://localhost:{port}/ok", "not_allowed"),
        ("file:///etc/hostname", "not_allowed"),
    ],
)
def test_what_cannot_be_fetched_fails_alone(script: Any, host: PictureHost, url: str, cause: str) -> None:
    script.send(Probe(seq_id=1, image_index=2, epoch=1, url=url.format(port=host.port)))
    failed = script.expect(ImageFailed)
    assert (failed.seq_id, failed.image_index, failed.epoch, failed.cause) == (1, 2, 1, cause)
    script.send(Probe(seq_id=2, image_index=0, epoch=1), PICTURE)
    assert script.expect(Shape).seq_id == 2


@pytest.mark.usefixtures("running")
def test_the_loop_talks_while_a_picture_is_fetched(script: Any, host: PictureHost) -> None:
    script.send(asked(host, "/slow", 1))
    wait_until(lambda: bool(host.requests), 30, "the request at its host")
    script.send(Probe(seq_id=2, image_index=2, epoch=1), PICTURE)
    assert script.expect(Shape).seq_id == 2
    script.send(asked(host, "/ok", 3))
    assert script.expect(Fetched).seq_id == 3
    script.send(Cancel(seq_id=1, image_index=2, epoch=9))  # another attempt: not this one
    script.send(asked(host, "/ok", 4))
    assert script.expect(Fetched).seq_id == 4
    assert not host.left.acquire(blocking=False)
    script.send(Cancel(seq_id=1, image_index=2, epoch=1))
    assert host.left.acquire(timeout=30)
    assert script.says_no_more()


def test_drain_waits_for_what_is_being_fetched(running: Future[None], script: Any, host: PictureHost) -> None:
    script.send(asked(host, "/slow", 1))
    wait_until(lambda: bool(host.requests), 30, "the request at its host")
    script.send(Drain())
    script.send(Probe(seq_id=2, image_index=2, epoch=1), PICTURE)
    assert script.expect(Shape).seq_id == 2
    assert not running.done()
    script.send(Cancel(seq_id=1, image_index=2, epoch=1))
    script.expect(Goodbye)
    running.result(60)


def test_the_end_does_not_wait_for_slow_hosts(running: Future[None], script: Any, host: PictureHost) -> None:
    script.send(asked(host, "/slow", 1))
    wait_until(lambda: bool(host.requests), 30, "the request at its host")
    script.send(Shutdown(why="enough"))
    running.result(30)
    assert host.left.acquire(timeout=30)
