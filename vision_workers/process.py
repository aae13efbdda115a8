"""Everything around the loop: what a vision worker process makes at its start and removes at its end."""

from __future__ import annotations

import contextlib
import logging
import os
import time

from airside.proto.channel import Link
from airside.proto.settings import VisionWorkerSettings
from airside.vision_workers.arena import Arena, Tensors
from airside.vision_workers.decode import decode
from airside.vision_workers.families.registry import load_family
from airside.vision_workers.header import ImageLimits
from airside.vision_workers.preparation import Preparation
from airside.vision_workers.worker import VisionWorker

log = logging.getLogger(__name__)


def run(settings: VisionWorkerSettings) -> None:
    """Serves until told to stop; the segment is gone afterwards, whatever ended it.

    Raises:
        UnsupportedModel: the checkpoint's pictures cannot be processed.
        FileExistsError: the segment is there already.
    """
    began = time.monotonic()
    os.nice(settings.nice)
    family = load_family(settings.model_path)
    limits = ImageLimits(settings.max_bytes, settings.max_pixels, settings.max_aspect)

    def prepare(data: bytes) -> Tensors:
        return family.process(decode(data, limits, settings.background))

    with contextlib.ExitStack() as stack:
        preparation = stack.enter_context(Preparation(prepare))
        # Closed before the preparation, which may take its time: the segment must not outlive an impatient parent.
        arena = stack.enter_context(Arena(settings.segment, settings.segment_bytes))
        link = Link(settings.endpoint, settings.name)
        stack.callback(link.close)
        worker = VisionWorker(link, family, arena, preparation, limits, settings.node)
        log.info("up: name=%s segment=%s load_s=%.1f", settings.name, settings.segment, time.monotonic() - began)
        worker.run()
