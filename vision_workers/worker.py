"""A vision worker's loop: takes jobs from the controller, answers with shapes and pixels, keeps the arena."""

from __future__ import annotations

import errno
import functools
import logging
import os
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import psutil
from numpy.typing import NDArray

from airside.proto.channel import Envelope, Link
from airside.proto.messages import (
    Cancel,
    Credit,
    Drain,
    Goodbye,
    Heartbeat,
    ImageFailed,
    Job,
    Message,
    Pixels,
    PixelsRef,
    Release,
    Shape,
    Shutdown,
    VisionHello,
)
from airside.vision_workers.arena import Arena, Tensors, slab_bytes
from airside.vision_workers.families.registry import Family
from airside.vision_workers.header import ImageLimits, probe
from airside.vision_workers.image_error import Cause, ImageError, attempt
from airside.vision_workers.preparation import Preparation, Prepared

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0

_IDLE_WAIT_MS = 250
_BUSY_WAIT_MS = 2  # how late an outcome may be noticed: nothing but a message wakes the socket


@dataclass(slots=True)
class _InHand:
    """The picture between the start of its preparation and its last message."""

    job: Job
    prepared: Prepared | None = None  # once set, it waits for room in the arena
    cancelled: bool = False


class VisionWorker:
    """The loop. It owns the socket and the arena; pixels are made in the `Preparation`'s thread.

    A picture is queued, then in hand, then done: every job ends with one `Credit`, after `Pixels`, after
    `ImageFailed`, or, when it was cancelled, after nothing. A draining worker gives no more credit.
    """

    def __init__(
        self, link: Link, family: Family, arena: Arena, preparation: Preparation, limits: ImageLimits, node: str
    ) -> None:
        self._link = link
        self._family = family
        self._arena = arena
        self._preparation = preparation
        self._limits = limits
        self._node = node
        self._process = psutil.Process()
        self._parent_pid = os.getppid()
        self._queue: deque[tuple[Job, bytes]] = deque()
        self._in_hand: _InHand | None = None
        self._draining = False
        self._stopped = False
        self._last_heartbeat = 0.0

    def run(self) -> None:
        """Says hello and works until the controller or the end of the parent process stops it."""
        self._link.send(VisionHello(node=self._node, pid=os.getpid(), segment=self._arena.segment))
        self._link.send(Credit(jobs=1))
        while not self._stopped:
            self._receive()
            self._settle()
            self._start_next()
            self._say_goodbye_when_drained()
            self._show_life()
            self._stop_when_orphaned()

    def _receive(self) -> None:
        preparing = self._in_hand is not None and self._in_hand.prepared is None
        envelope = self._link.receive(_BUSY_WAIT_MS if preparing else _IDLE_WAIT_MS)
        if envelope is not None:
            self._handle(envelope)

    def _handle(self, envelope: Envelope) -> None:
        match envelope.message:
            case Job() as job:
                self._take(job, b"".join(envelope.attachments))
            case Cancel() as cancel:
                self._cancel(cancel)
            case Release(slab=slab) if self._arena.holds(slab):
                self._arena.release(slab)
            case Release(slab=slab):
                log.warning("release of a slab that is not out: slab=%d", slab)
            case Drain():
                log.info("draining: queued=%d slabs=%d", len(self._queue), self._arena.num_slabs)
                self._draining = True
            case Shutdown(why=why):
                log.info("shutting down: %s", why)
                self._stopped = True
            case other:
                log.error("a vision worker has no use for a %s", type(other).__name__)

    def _take(self, job: Job, data: bytes) -> None:
        """Answers with the shape at once, whatever else is in hand, and queues the rest of the work."""
        expansion = attempt(functools.partial(self._expansion, data))
        if isinstance(expansion, ImageError):
            self._finish(_failed(job, expansion))
            return
        ids = expansion.astype("<i4").tobytes()
        self._link.send(Shape(seq_id=job.seq_id, image_index=job.image_index, epoch=job.epoch, expansion=ids))
        self._queue.append((job, data))

    def _expansion(self, data: bytes) -> NDArray[np.int32]:
        header = probe(data, self._limits)
        return self._family.shape(header.width, header.height)

    def _cancel(self, cancel: Cancel) -> None:
        if self._in_hand is not None and _same(self._in_hand.job, cancel):
            self._in_hand.cancelled = True
        for queued in [entry for entry in self._queue if _same(entry[0], cancel)]:
            self._queue.remove(queued)
            self._finish(None)

    def _start_next(self) -> None:
        if self._in_hand is None and self._queue:
            job, data = self._queue.popleft()
            self._in_hand = _InHand(job)
            self._preparation.start(data)

    def _settle(self) -> None:
        """Ends the picture in hand if it can end now; one that finds no room waits for `Release` messages."""
        if self._in_hand is None:
            return
        self._in_hand.prepared = self._in_hand.prepared or self._preparation.take()
        prepared = self._in_hand.prepared
        if prepared is None:
            return
        if self._in_hand.cancelled:
            self._conclude(None)
        elif isinstance(prepared.outcome, ImageError):
            self._conclude(_failed(self._in_hand.job, prepared.outcome))
        elif self._arena.can_write(prepared.outcome) or slab_bytes(prepared.outcome) > self._arena.bytes_total:
            self._conclude(self._deliver(self._in_hand.job, prepared.outcome, prepared.process_s))

    def _deliver(self, job: Job, tensors: Tensors, process_s: float) -> Pixels | ImageFailed:
        pixels = attempt(functools.partial(self._write, tensors))
        if isinstance(pixels, ImageError):
            return _failed(job, pixels)
        return Pixels(
            seq_id=job.seq_id, image_index=job.image_index, epoch=job.epoch, pixels=pixels, process_s=process_s
        )

    def _write(self, tensors: Tensors) -> PixelsRef:
        wanted = slab_bytes(tensors)
        if wanted > self._arena.bytes_total:
            raise ImageError(
                Cause.ARENA_TOO_SMALL,
                f"its tensors take {wanted} bytes; the arena has {self._arena.bytes_total} (vision.arena)",
            )
        try:
            return self._arena.write_tensors(tensors)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise ImageError(Cause.ARENA_TOO_SMALL, "the machine's shared memory (/dev/shm) is full") from error

    def _conclude(self, last: Message | None) -> None:
        self._in_hand = None
        self._finish(last)

    def _finish(self, last: Message | None) -> None:
        if isinstance(last, ImageFailed):
            log.info("picture refused: seq=%d image=%d cause=%s", last.seq_id, last.image_index, last.cause)
        if last is not None:
            self._link.send(last)
        if not self._draining:
            self._link.send(Credit(jobs=1))

    def _say_goodbye_when_drained(self) -> None:
        in_hand = len(self._queue) + (self._in_hand is not None)
        if self._draining and in_hand == 0 and self._arena.num_slabs == 0 and not self._stopped:
            self._link.send(Goodbye())
            self._stopped = True

    def _show_life(self) -> None:
        """However busy: nothing else tells how much memory is in use."""
        now = time.monotonic()
        if now - self._last_heartbeat >= HEARTBEAT_S:
            self._last_heartbeat = now
            self._link.send(Heartbeat(rss_bytes=self._process.memory_info().rss))

    def _stop_when_orphaned(self) -> None:
        if os.getppid() != self._parent_pid:
            log.error("the process that started this one is gone: exiting")
            self._stopped = True


def _same(job: Job, cancel: Cancel) -> bool:
    return (job.seq_id, job.image_index, job.epoch) == (cancel.seq_id, cancel.image_index, cancel.epoch)


def _failed(job: Job, error: ImageError) -> ImageFailed:
    return ImageFailed(
        seq_id=job.seq_id,
        image_index=job.image_index,
        epoch=job.epoch,
        cause=error.cause.value,
        detail=error.detail,
    )
