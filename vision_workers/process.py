"""Everything around the loop: what a vision worker process makes at its start and removes at its end."""

from __future__ import annotations

import contextlib
import logging
import os
import time

from PIL import Image

from airside.proto.channel import Link
from airside.proto.garbage import keep_what_is_loaded
from airside.proto.settings import VisionWorkerSettings
from airside.vision_workers.arena import Arena
from airside.vision_workers.decode import decode
from airside.vision_workers.families.registry import load_family
from airside.vision_workers.fetch.fetcher import Fetcher
from airside.vision_workers.header import ImageLimits
from airside.vision_workers.parcel_account import ParcelAccount
from airside.vision_workers.pixel_store import PixelStore
from airside.vision_workers.preparation import Preparation
from airside.vision_workers.segment import bytes_there
from airside.vision_workers.worker import VisionWorker

log = logging.getLogger(__name__)


def run(settings: VisionWorkerSettings) -> None:
    """Serves until told to stop; the segment is gone afterwards, whatever ended it.

    Raises:
        UnsupportedModel: the checkpoint's pictures cannot be processed.
        FileExistsError: the segment is there already.
        NoRoomForSegment: /dev/shm is full.
        ConnectionBroken: the controller is on another node, and what was on its way may be lost.
    """
    began = time.monotonic()
    os.nice(settings.nice)
    family = load_family(settings.model_path)
    limits = ImageLimits(settings.max_bytes, settings.max_pixels, settings.max_aspect)

    def decode_file(data: bytes) -> Image.Image:
        return decode(data, limits, settings.background)

    with contextlib.ExitStack() as stack:
        preparation = stack.enter_context(Preparation(decode_file, family.process))
        # Closed before the preparation, which may take its time: the segment must not outlive an impatient parent.
        store = stack.enter_context(_open_store(settings))
        link = Link(settings.endpoint, settings.name, settings.network_keys)
        stack.callback(link.close)
        fetcher = Fetcher.of(settings)
        stack.callback(fetcher.close)
        worker = VisionWorker(link, family, store, preparation, limits, fetcher, settings.node)
        load_s = time.monotonic() - began
        log.info(
            "up: name=%s segment=%s shared=%s load_s=%.1f", settings.name, settings.segment, store.shares_memory, load_s
        )
        keep_what_is_loaded()
        worker.run()


def _open_store(settings: VisionWorkerSettings) -> PixelStore:
    if settings.shares_memory:
        return Arena(settings.segment, _segment_bytes(settings))
    return ParcelAccount(settings.segment, settings.segment_bytes)


def _segment_bytes(settings: VisionWorkerSettings) -> int:
    """As many as the machine can have: pictures then wait for room, where in a larger arena they would fail."""
    there = bytes_there()
    if there is None or settings.segment_bytes <= there:
        return settings.segment_bytes
    log.warning(
        "vision.arena has %d bytes, /dev/shm only %d, and that is what is used; in a container, --shm-size says more",
        settings.segment_bytes,
        there,
    )
    return there
