"""A vision worker's loop: answers probes, takes jobs, and keeps the store that their pixels are written to."""

from __future__ import annotations

import errno
import functools
import logging
import os
import time
from collections import deque
from dataclasses import dataclass

import psutil
from PIL import Image

from airside.proto.channel import Envelope, Link
from airside.proto.image_content import ANY_PIXELS, PixelRange, content_hash
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
    Pixels,
    Probe,
    Release,
    Shape,
    Shutdown,
    VisionHello,
)
from airside.proto.work_marks import JobKey, Work
from airside.vision_workers.families.family import Family, ScalingFamily
from airside.vision_workers.fetch.fetcher import Fetcher
from airside.vision_workers.header import ImageLimits, probe
from airside.vision_workers.image_error import Cause, ImageError, attempt
from airside.vision_workers.pixel_store import PixelStore, Tensors, Written, slab_bytes
from airside.vision_workers.preparation import Picture, Preparation, Prepared

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
ARENA_FULL_S = 0.1
"""How often the controller is told that a picture waits for room."""

MEMORY_FULL_MAX_S = 3.0
"""For so long a picture waits for shared memory while the machine has none."""

WINDOW_JOBS = 4
"""Credits at the start. The controller gives more than one job only while they are small."""

_AHEAD = 2  # pictures in the thread, so that it has the next one while the loop delivers the last
_IDLE_WAIT_MS = 250
_FETCH_WAIT_MS = 10  # how late a fetched file may be noticed


@dataclass(slots=True)
class _InHand:
    """A job from its message to its credit."""

    job: Job
    picture: Picture
    memory_full_since: float | None = None  # when the machine first had no memory for its tensors

    @property
    def key(self) -> JobKey:
        return _key(self.job)


class VisionWorker:
    """The loop. It owns the socket and the store; pixels are made in the `Preparation`'s thread.

    A job is queued, then started, then done, in the order of the messages: it ends with one `Credit`, after `Pixels`,
    after `ImageFailed`, or, when it was cancelled, after nothing. That comes in its turn, so that each credit says that
    the thread goes on; that of a draining worker says nothing else.

    Args:
        fetcher: for pictures that are named by URL. It answers each in bounded time.
    """

    def __init__(
        self,
        link: Link,
        family: Family,
        store: PixelStore,
        preparation: Preparation,
        limits: ImageLimits,
        fetcher: Fetcher,
        node: str,
    ) -> None:
        self._link = link
        self._family = family
        self._store = store
        self._preparation = preparation
        self._limits = limits
        self._node = node
        self._fetcher = fetcher
        self._process = psutil.Process()
        self._parent_pid = os.getppid()
        self._to_fetch: dict[JobKey, PixelRange] = {}
        self._queue: deque[_InHand] = deque()
        self._started: deque[_InHand] = deque()
        self._waits_for_room = False
        self._draining = False
        self._stopped = False
        self._last_heartbeat = 0.0
        self._last_arena_full = 0.0

    def run(self) -> None:
        """Says hello and works until the controller or the end of the parent process stops it."""
        self._link.watch(self._preparation.wake_fd)
        self._link.send(
            VisionHello(
                node=self._node,
                pid=os.getpid(),
                segment=self._store.segment,
                segment_bytes=self._store.bytes_total,
                shares_memory=self._store.shares_memory,
            )
        )
        self._link.send(Credit(jobs=WINDOW_JOBS))
        while not self._stopped:
            self._receive()
            self._answer_fetched()
            self._settle()
            self._start_next()
            self._store.give_back()
            self._say_goodbye_when_drained()
            self._show_life()
            self._stop_when_orphaned()

    def _receive(self) -> None:
        wait_ms = _FETCH_WAIT_MS if self._fetcher.num_open else _IDLE_WAIT_MS
        if self._waits_for_room:
            wait_ms = min(wait_ms, int(ARENA_FULL_S * 1000))
        envelope = self._link.receive(wait_ms)
        if envelope is not None:
            self._handle(envelope)

    def _handle(self, envelope: Envelope) -> None:
        match envelope.message:
            case Probe(url="") as asked:
                self._answer(_key(asked), b"".join(envelope.attachments), _within(asked))
            case Probe() as asked:
                self._to_fetch[_key(asked)] = _within(asked)
                self._fetcher.start(_key(asked), asked.url)
            case Job() as job:
                self._enqueue(job, b"".join(envelope.attachments))
            case Cancel() as cancel:
                self._cancel(cancel)
            case Release(slab=slab) if self._store.holds(slab):
                self._store.release(slab)
            case Release(slab=slab):
                log.warning("release of a slab that is not out: slab=%d", slab)
            case Drain():
                log.info("draining: jobs=%d slabs=%d", len(self._queue) + len(self._started), self._store.num_slabs)
                self._draining = True
            case Shutdown(why=why):
                log.info("shutting down: %s", why)
                self._stopped = True
            case other:
                log.error("a vision worker has no use for a %s", type(other).__name__)

    # --- probes ---------------------------------------------------------------------------------------------------

    def _answer(self, key: JobKey, data: bytes, within: PixelRange) -> None:
        """Says at once what the header says, whatever else is in hand."""
        with self._store.marked(Work.HEADER, key):
            shape = attempt(functools.partial(self._shape, key, data, within))
        if isinstance(shape, ImageError):
            self._refuse(key, shape)
        else:
            self._link.send(shape)

    def _shape(self, key: JobKey, data: bytes, within: PixelRange) -> Shape:
        header = probe(data, self._limits)
        shape = _scaling(self._family, within).shape(header.width, header.height)
        return Shape(
            *key,
            expansion=shape.expansion.astype("<i4").tobytes(),
            width=header.width,
            height=header.height,
            rope_advance=shape.rope_advance,
        )

    def _answer_fetched(self) -> None:
        for key, file, fetch_s in self._fetcher.take():
            within = self._to_fetch.pop(key, ANY_PIXELS)
            if isinstance(file, ImageError):
                self._refuse(key, file)
            else:
                self._link.send(Fetched(*key, content_hash=content_hash(file, within), fetch_s=fetch_s), [file])

    # --- jobs -----------------------------------------------------------------------------------------------------

    def _enqueue(self, job: Job, data: bytes) -> None:
        at_work = functools.partial(self._store.marked, Work.PICTURE, _key(job))
        within = _within(job)
        process = functools.partial(_process, self._family, within) if any(within) else None
        self._queue.append(_InHand(job, Picture(data, at_work, process)))

    def _cancel(self, cancel: Cancel) -> None:
        key = _key(cancel)
        self._to_fetch.pop(key, None)
        self._fetcher.cancel(key)
        for hand in (*self._started, *self._queue):
            if hand.key == key:
                hand.picture.drop()

    def _start_next(self) -> None:
        while self._queue and len(self._started) < _AHEAD:
            hand = self._queue.popleft()
            self._preparation.start(hand.picture)
            self._started.append(hand)

    def _settle(self) -> None:
        """Ends the started jobs that can end now. Of those that need room, the first waits, and the others for it."""
        self._preparation.take()
        self._waits_for_room = False
        for hand in list(self._started):
            if hand.picture.prepared is None:
                return
            self._settle_one(hand, hand.picture.prepared)

    def _settle_one(self, hand: _InHand, prepared: Prepared) -> None:
        outcome = prepared.outcome
        if outcome is None or not hand.picture.is_wanted:
            self._conclude(hand)
        elif isinstance(outcome, ImageError):
            self._refuse(hand.key, outcome)
            self._conclude(hand)
        elif not self._waits_for_room:
            self._deliver(hand, outcome, prepared)

    def _deliver(self, hand: _InHand, tensors: Tensors, prepared: Prepared) -> None:
        """Writes the tensors; if there is no room for them, asks for some, and they wait."""
        written = attempt(functools.partial(self._write, hand, tensors))
        if isinstance(written, ImageError):
            self._refuse(hand.key, written)
            self._conclude(hand)
        elif written is None:
            self._waits_for_room = True
        else:
            process_s, decode_s = prepared.process_s, prepared.decode_s
            pixels = Pixels(*hand.key, pixels=written.ref, process_s=process_s, decode_s=decode_s)
            self._link.send(pixels, written.frames)
            self._conclude(hand)

    def _write(self, hand: _InHand, tensors: Tensors) -> Written | None:
        """Where the tensors are; None: there is no room now. Raises ImageError when there will be none."""
        wanted = slab_bytes(tensors)
        if wanted > self._store.bytes_total:
            raise ImageError(
                Cause.ARENA_TOO_SMALL,
                f"its tensors take {wanted} bytes; the arena has {self._store.bytes_total} (vision.arena)",
            )
        if not self._store.can_write(tensors):
            self._ask_for_room(ArenaFull(wanted))
            return None
        try:
            return self._store.write_tensors(tensors)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            if self._has_waited(hand):
                raise ImageError(
                    Cause.MEMORY_FULL,
                    "the machine's shared memory (/dev/shm) is full; it must have room for vision.arena of each vision "
                    "worker",
                ) from error
            self._ask_for_room(ArenaFull(wanted, is_memory_full=True))
            return None

    @staticmethod
    def _has_waited(hand: _InHand) -> bool:
        """Whether the machine had no memory for this one for long: it may not be ours to free."""
        now = time.monotonic()
        if hand.memory_full_since is None:
            hand.memory_full_since = now
        return now - hand.memory_full_since > MEMORY_FULL_MAX_S

    def _ask_for_room(self, message: ArenaFull) -> None:
        now = time.monotonic()
        if now - self._last_arena_full >= ARENA_FULL_S:
            self._last_arena_full = now
            self._link.send(message)

    def _conclude(self, hand: _InHand) -> None:
        self._started.remove(hand)
        self._link.send(Credit(jobs=1))

    def _refuse(self, key: JobKey, error: ImageError) -> None:
        log.info("picture refused: seq=%d image=%d cause=%s", key[0], key[1], error.cause)
        self._link.send(ImageFailed(*key, cause=error.cause.value, detail=error.detail))

    # --- the worker itself ----------------------------------------------------------------------------------------

    def _say_goodbye_when_drained(self) -> None:
        in_hand = len(self._queue) + len(self._started) + self._fetcher.num_open
        if self._draining and in_hand == 0 and self._store.num_slabs == 0 and not self._stopped:
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


def _key(message: Probe | Job | Cancel) -> JobKey:
    return message.seq_id, message.image_index, message.epoch


def _within(message: Probe | Job) -> PixelRange:
    return PixelRange(message.min_pixels, message.max_pixels)


def _scaling(family: Family, within: PixelRange) -> Family:
    """The family, for a picture that is to be within so many pixels. Raises ImageError."""
    if not any(within):
        return family
    if not isinstance(family, ScalingFamily):
        raise ImageError(Cause.BAD_PIXEL_RANGE, "this model scales each picture in one way only")
    return family.within(within)


def _process(family: Family, within: PixelRange, image: Image.Image) -> Tensors:
    return _scaling(family, within).process(image)
