"""Every image from its arrival to the release of its pixels. Pure: methods return what is to be done.

    QUEUED ──dispatch──> PROCESSING ──Pixels──> READY ──sequence ended, not in a step──> (released)
       ^                     │
       └── worker lost ──────┘   with epoch + 1; after `attempts_max` lost workers the image fails

A message from a vision worker counts only when it carries the image's current epoch and comes from the worker that
the image was given to; any other is stale and changes nothing, but a slab that comes with it is given back at once.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from airside.proto.messages import Cancel, Drain, ImageFailed, Job, Message, Pixels, PixelsRef, Release, Shape

ImageKey = tuple[int, int]
"""(seq_id, image_index)"""

_COUNT_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True, slots=True)
class Send:
    """A message to put on the bus."""

    peer: str
    message: Message
    attachments: tuple[memoryview, ...] = ()


@dataclass(frozen=True, slots=True)
class ShapeKnown:
    """The engine may be told how many tokens an image takes. At most once per image."""

    seq_id: int
    image_index: int
    expansion: bytes  # i32


@dataclass(frozen=True, slots=True)
class PixelsReady:
    """The engine and the front end may be told that an image is ready. At most once per image, after `ShapeKnown`."""

    seq_id: int
    image_index: int
    num_tokens: int
    process_s: float


@dataclass(frozen=True, slots=True)
class VisionFailed:
    """The sequence cannot go on: one of its images failed. At most once per image."""

    seq_id: int
    detail: str


@dataclass(frozen=True, slots=True)
class SegmentUnused:
    """The segment of a vision worker that is gone holds no pixels that anybody needs."""

    segment: str


Effect = Send | ShapeKnown | PixelsReady | VisionFailed | SegmentUnused


class ImageState(Enum):
    """Where an image is; see the drawing above."""

    QUEUED = auto()
    PROCESSING = auto()
    READY = auto()
    FAILED = auto()


@dataclass(slots=True)
class _Image:
    key: ImageKey
    data: memoryview | None  # the file's bytes, until the pixels are in
    state: ImageState = ImageState.QUEUED
    epoch: int = 0  # attempts so far
    worker: str | None = None  # who has the job; set exactly while PROCESSING
    num_tokens: int | None = None  # known once the shape is
    pixels: PixelsRef | None = None  # the lease; set exactly while READY


@dataclass(slots=True)
class _VisionWorker:
    name: str
    segment: str
    credits: int = 0
    draining: bool = False
    jobs: dict[ImageKey, _Image] = field(default_factory=dict)  # in hand, in the order they were given
    jobs_done: int = 0
    progress_at: float = 0.0  # last job given to an empty hand, last word about a job, or last seen waiting for room


class VisionLedger:
    """All images of all live sequences, and all vision workers.

    Args:
        attempts_max: how many vision workers may die with one image in hand before it is refused.
    """

    def __init__(self, attempts_max: int) -> None:
        self._attempts_max = attempts_max
        self._sequences: dict[int, list[_Image]] = {}
        self._queue: OrderedDict[ImageKey, _Image] = OrderedDict()
        self._workers: dict[str, _VisionWorker] = {}
        self._leases: Counter[str] = Counter()  # slabs of each segment that are ours
        self._steps: deque[frozenset[int]] = deque()  # per step in flight, the sequences whose pixels it reads
        self._orphans: dict[str, str] = {}  # leased segments of lost workers, and whose they were
        self._held: list[tuple[int, PixelsRef]] = []  # leases of ended sequences that steps in flight still read

    # --- sequences ------------------------------------------------------------------------------------------------

    def add(self, seq_id: int, images: Sequence[memoryview], now: float) -> list[Effect]:
        """Takes the images of a new sequence, in mark order."""
        assert seq_id not in self._sequences, seq_id
        if not images:
            return []
        rows = [_Image((seq_id, index), data) for index, data in enumerate(images)]
        self._sequences[seq_id] = rows
        self._queue.update((image.key, image) for image in rows)
        return self._dispatch(now)

    def end(self, seq_id: int) -> list[Effect]:
        """Lets go of a sequence: cancels what is under way, gives back what no step reads. Unknown ones are fine."""
        effects: list[Effect] = []
        for image in self._sequences.pop(seq_id, ()):
            self._queue.pop(image.key, None)
            if image.worker is not None:
                self._workers[image.worker].jobs.pop(image.key)
                effects.append(Send(image.worker, Cancel(*image.key, image.epoch)))
            if image.pixels is not None and self._is_read(seq_id):
                self._held.append((seq_id, image.pixels))
            elif image.pixels is not None:
                effects += self._release(image.pixels)
        return effects

    def begin_step(self, seq_ids: Iterable[int]) -> None:
        """A step that reads these sequences' pixels is in flight: their slabs stay until no such step is."""
        self._steps.append(frozenset(seq_ids))

    def close_step(self) -> list[Effect]:
        """The oldest step in flight is done."""
        self._steps.popleft()
        if not self._held:
            return []
        over = [pixels for seq_id, pixels in self._held if not self._is_read(seq_id)]
        self._held = [(seq_id, pixels) for seq_id, pixels in self._held if self._is_read(seq_id)]
        return [effect for pixels in over for effect in self._release(pixels)]

    def drop_steps(self) -> list[Effect]:
        """All steps in flight are lost, and nobody reads for them any more."""
        effects: list[Effect] = []
        while self._steps:
            effects += self.close_step()
        return effects

    def pixels(self, seq_id: int, image_index: int) -> PixelsRef:
        """Where the pixels of a ready image of a live sequence are."""
        pixels = self._sequences[seq_id][image_index].pixels
        assert pixels is not None, (seq_id, image_index)
        return pixels

    # --- vision workers -------------------------------------------------------------------------------------------

    def join(self, name: str, segment: str) -> None:
        """A vision worker is up. It gets jobs once it has given credits. `name` must not be a live worker's."""
        assert name not in self._workers, name
        self._workers[name] = _VisionWorker(name, segment)

    def credit(self, name: str, jobs: int, now: float) -> list[Effect]:
        """The worker can take `jobs` more. Ignored for workers that are unknown or draining."""
        worker = self._workers.get(name)
        if worker is None or worker.draining or jobs <= 0:
            return []
        worker.credits += jobs
        return self._dispatch(now)

    def drain(self, name: str) -> list[Effect]:
        """The worker gets no more jobs and is asked to leave. Unknown and already draining ones are fine."""
        worker = self._workers.get(name)
        if worker is None or worker.draining:
            return []
        worker.draining, worker.credits = True, 0
        return [Send(name, Drain())]

    def lose(self, name: str, now: float) -> list[Effect]:
        """The worker is gone. Its jobs go to others; its segment stays as long as a live sequence needs it."""
        worker = self._workers.pop(name, None)
        if worker is None:
            return []
        effects: list[Effect] = []
        for image in reversed(worker.jobs.values()):  # the oldest ends up at the front of the queue
            image.worker = None
            if image.epoch >= self._attempts_max:
                effects.append(self._fail(image, f"{_vision_workers(image.epoch)} died on it"))
            else:
                image.state = ImageState.QUEUED
                self._queue[image.key] = image
                self._queue.move_to_end(image.key, last=False)
        if not self._leases[worker.segment]:
            del self._leases[worker.segment]
            effects.append(SegmentUnused(worker.segment))
        else:
            self._orphans[worker.segment] = name
        return effects + self._dispatch(now)

    def stuck(self, now: float, silence_max_s: float) -> list[str]:
        """Workers that have had jobs in hand for this long without a word about any. To be asked once in a while.

        A worker whose slabs we hold may be waiting for room rather than hang: its time starts when they are back.
        """
        for worker in self._workers.values():
            if self._leases[worker.segment]:
                worker.progress_at = now
        return [w.name for w in self._workers.values() if w.jobs and now - w.progress_at > silence_max_s]

    # --- what vision workers say ----------------------------------------------------------------------------------

    def shape(self, peer: str, message: Shape, now: float) -> list[Effect]:
        """The token ids that take an image's place. A second attempt's shape is the same and says nothing new."""
        image = self._current(peer, message, now)
        if image is None or image.num_tokens is not None:
            return []
        image.num_tokens = len(message.expansion) // 4
        return [ShapeKnown(*image.key, message.expansion)]

    def pixels_in(self, peer: str, message: Pixels, now: float) -> list[Effect]:
        """An image's tensors are in the sender's segment."""
        image = self._current(peer, message, now)
        if image is None:
            return [Send(peer, Release(message.pixels.slab))]
        worker = self._finish_job(image)
        if image.num_tokens is None or message.pixels.segment != worker.segment:
            what = "pixels without a shape" if image.num_tokens is None else "pixels in a foreign segment"
            return [Send(peer, Release(message.pixels.slab)), self._fail(image, f"the vision worker sent {what}")]
        image.state, image.data, image.pixels = ImageState.READY, None, message.pixels
        self._leases[worker.segment] += 1
        return [PixelsReady(*image.key, image.num_tokens, message.process_s), *self._dispatch(now)]

    def image_failed(self, peer: str, message: ImageFailed, now: float) -> list[Effect]:
        """An image that cannot be used ends its sequence."""
        image = self._current(peer, message, now)
        if image is None:
            return []
        self._finish_job(image)
        return [self._fail(image, f"{message.cause}: {message.detail}"), *self._dispatch(now)]

    # --- what others may ask --------------------------------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        """Images that wait for a vision worker."""
        return len(self._queue)

    @property
    def num_workers(self) -> int:
        """Vision workers that take jobs: live, and not asked to leave."""
        return sum(not worker.draining for worker in self._workers.values())

    def segment_of(self, name: str) -> str | None:
        """The segment of a vision worker that is here."""
        worker = self._workers.get(name)
        return None if worker is None else worker.segment

    def worker_states(self) -> dict[str, str]:
        """ "draining", "busy" or "ready" by worker."""
        return {w.name: "draining" if w.draining else "busy" if w.jobs else "ready" for w in self._workers.values()}

    def jobs_done(self) -> dict[str, int]:
        """Images done, well or not, by worker."""
        return {worker.name: worker.jobs_done for worker in self._workers.values()}

    def is_orphan(self, segment: str) -> bool:
        """Whether this segment's worker is gone while live sequences need pixels in it."""
        return segment in self._orphans

    def needs_segment_of(self, name: str) -> bool:
        """Whether live sequences need pixels in the segment of this lost worker."""
        return name in self._orphans.values()

    def check(self) -> None:
        """Asserts every invariant."""
        images = [image for rows in self._sequences.values() for image in rows]
        for image in images:
            assert (image.state is ImageState.QUEUED) == (image.key in self._queue)
            assert (image.state is ImageState.PROCESSING) == (image.worker is not None)
            assert (image.state is ImageState.READY) == (image.pixels is not None)
            assert image.worker is None or self._workers[image.worker].jobs[image.key] is image
            assert 0 <= image.epoch <= self._attempts_max
        assert len(self._queue) == sum(image.state is ImageState.QUEUED for image in images)
        assert sum(len(w.jobs) for w in self._workers.values()) == sum(image.worker is not None for image in images)
        assert all(worker.credits >= 0 for worker in self._workers.values())
        assert all(self._is_read(seq_id) for seq_id, _ in self._held)
        leased = [image.pixels.segment for image in images if image.pixels] + [
            pixels.segment for _, pixels in self._held
        ]
        assert Counter(leased) == self._leases
        owned = {worker.segment for worker in self._workers.values()}
        assert set(self._orphans) == set(self._leases) - owned

    # --- inside ---------------------------------------------------------------------------------------------------

    def _is_read(self, seq_id: int) -> bool:
        return any(seq_id in step for step in self._steps)

    def _dispatch(self, now: float) -> list[Effect]:
        """Gives queued images, oldest first, to the workers with credit and the fewest jobs in hand."""
        effects: list[Effect] = []
        while self._queue:
            image = next(iter(self._queue.values()))
            worker = self._worker_for(image)
            if worker is None:
                break
            effects.append(self._give(image, worker, now))
        return effects

    def _worker_for(self, image: _Image) -> _VisionWorker | None:
        # An image that has lost a worker is tried alone: were it the cause, its neighbours would be blamed as well.
        able = [w for w in self._workers.values() if w.credits and not any(job.epoch > 1 for job in w.jobs.values())]
        if image.epoch:
            able = [worker for worker in able if not worker.jobs]
        return min(able, key=lambda worker: len(worker.jobs), default=None)

    def _give(self, image: _Image, worker: _VisionWorker, now: float) -> Send:
        assert image.data is not None
        assert worker.credits > 0
        del self._queue[image.key]
        image.state, image.worker = ImageState.PROCESSING, worker.name
        image.epoch += 1
        if not worker.jobs:
            worker.progress_at = now
        worker.jobs[image.key] = image
        worker.credits -= 1
        return Send(worker.name, Job(*image.key, image.epoch), (image.data,))

    def _current(self, peer: str, message: Shape | Pixels | ImageFailed, now: float) -> _Image | None:
        """The image that a message is about; None when the message is stale."""
        worker = self._workers.get(peer)
        image = worker.jobs.get((message.seq_id, message.image_index)) if worker else None
        if worker is None or image is None or image.epoch != message.epoch:
            return None
        worker.progress_at = now
        return image

    def _finish_job(self, image: _Image) -> _VisionWorker:
        assert image.worker is not None
        worker = self._workers[image.worker]
        del worker.jobs[image.key]
        worker.jobs_done += 1
        image.worker = None
        return worker

    def _fail(self, image: _Image, detail: str) -> VisionFailed:
        image.state, image.data = ImageState.FAILED, None
        seq_id, image_index = image.key
        return VisionFailed(seq_id, f"image {image_index}: {detail}")

    def _release(self, pixels: PixelsRef) -> list[Effect]:
        """Gives a slab back; the last one of a worker that is gone frees its segment."""
        self._leases[pixels.segment] -= 1
        assert self._leases[pixels.segment] >= 0, pixels
        owner = next((w for w in self._workers.values() if w.segment == pixels.segment), None)
        if owner is not None:
            return [Send(owner.name, Release(pixels.slab))]
        if self._leases[pixels.segment]:
            return []
        del self._leases[pixels.segment], self._orphans[pixels.segment]
        return [SegmentUnused(pixels.segment)]


def _vision_workers(count: int) -> str:
    word = _COUNT_WORDS[count] if count < len(_COUNT_WORDS) else str(count)
    return f"{word} vision worker{'' if count == 1 else 's'}"
