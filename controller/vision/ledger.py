"""Every image from its arrival to the release of its pixels. Pure: methods return what is to be done.

    image:  waits for its job ──> ready by a slab ──sequence ended, not in a step──> (let go)
    job:    UNKNOWN ──Probe──> PROBING ──Shape──> QUEUED ──Job──> PROCESSING ──Pixels──> over    `pixel_jobs.py`
    slab:   in use ──last image let go──> idle ──room wanted──> freed ──Release                  `pixel_cache.py`

An image whose content is known to be that of a slab is ready at once; one whose content is that of a job waits for that
job. So equal pictures are made once, at the same time or later.

A message from a vision worker counts only when what it is about is in its hand, by sequence, image and epoch; any other
is stale and changes nothing, but a slab that comes with it is given back at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from airside.controller.vision.arena_deadlock import deadlocked
from airside.controller.vision.content import of_url, salted
from airside.controller.vision.dispatch import VisionDispatch, VisionLimits
from airside.controller.vision.effects import (
    Effect,
    ParcelUnused,
    PixelsReady,
    SegmentUnused,
    Send,
    ShapeKnown,
    VisionFailed,
)
from airside.controller.vision.peers import VisionPeer
from airside.controller.vision.pixel_cache import PixelCache, Slab
from airside.controller.vision.pixel_jobs import Image, KnownShape, PixelJob
from airside.controller.vision.step_reads import StepReads
from airside.proto import messages as msg
from airside.proto.image_cause import ImageCause
from airside.proto.image_content import ANY_PIXELS, HASH_BYTES, PixelRange, pixel_ranges
from airside.proto.work_marks import JobKey

_DEFAULTS = VisionLimits()
_COUNT_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True, slots=True)
class ImageFile:
    """One image as a request brings it.

    `url`: where it is fetched from, if `data` is empty. `hash`: 16 bytes, equal for equal pictures; b"": not known.
    """

    data: memoryview
    url: str = ""
    hash: bytes = b""
    within: PixelRange = ANY_PIXELS


def image_files(request: msg.AddRequest, attachments: Sequence[memoryview]) -> list[ImageFile]:
    """The images of a request, one attachment each. A gateway may leave out hashes, and URLs where there are none."""
    hashes, urls = request.image_hashes, request.image_urls
    ranges = pixel_ranges(request.image_min_pixels, request.image_max_pixels, len(attachments))
    return [
        ImageFile(data, urls[index] if urls else "", hashes[index] if hashes else b"", ranges[index])
        for index, data in enumerate(attachments)
    ]


class VisionLedger:
    """All images of all live sequences, and all vision workers. Times are seconds of one monotonic clock."""

    def __init__(self, limits: VisionLimits = _DEFAULTS) -> None:
        self._limits = limits
        self._sequences: dict[int, list[Image]] = {}  # in the order they came
        self._cache = PixelCache(limits.cache_bytes)
        self._dispatch = VisionDispatch(limits, self._cache)
        self._jobs, self._peers = self._dispatch.jobs, self._dispatch.peers
        self._steps = StepReads()
        self._held: list[tuple[int, Slab]] = []  # slabs of ended sequences that steps in flight still read
        self._orphans: dict[str, VisionPeer] = {}  # leased segments of lost workers, and whose they were
        self._num_hits = self._num_misses = 0

    # --- sequences ------------------------------------------------------------------------------------------------

    def add(self, seq_id: int, files: Sequence[ImageFile], now: float, salt: str = "") -> list[Effect]:
        """Takes the images of a new sequence, in mark order. Pixels are shared among sequences of the same salt."""
        assert seq_id not in self._sequences, seq_id
        if not files:
            return []
        self._sequences[seq_id] = images = []
        effects: list[Effect] = []
        for index, file in enumerate(files):
            image = Image((seq_id, index), now, salted(file.hash, salt))
            images.append(image)
            effects += self._settle(image, file, salt)
        return effects + self._dispatch.advance(now)

    def end(self, seq_id: int, now: float) -> list[Effect]:
        """Lets go of a sequence: cancels what nobody else wants, gives back what no step reads. Unknown: fine."""
        effects: list[Effect] = []
        images = self._sequences.pop(seq_id, [])
        for image in images:
            if image.job is not None:
                effects += self._leave(image)
            if image.slab is not None and self._steps.has(seq_id):
                self._held.append((seq_id, image.slab))
            elif image.slab is not None:
                effects += self._let_go(image.slab)
        return effects + (self._dispatch.advance(now) if images else [])

    def begin_step(self, seq_ids: Iterable[int]) -> None:
        """A step that reads these sequences' pixels is in flight: their slabs stay until no such step is."""
        self._steps.begin(seq_ids)

    def close_step(self) -> list[Effect]:
        """The oldest step in flight is done."""
        self._steps.close()
        return self._let_go_held() if self._held else []

    def drop_steps(self) -> list[Effect]:
        """All steps in flight are lost, and nobody reads for them any more."""
        self._steps.clear()
        return self._let_go_held()

    def pixels(self, seq_id: int, image_index: int) -> tuple[msg.PixelsRef, bytes]:
        """Where the pixels of a ready image of a live sequence are, and its content (b"": not known)."""
        return self.slab_of(seq_id, image_index).ref, self._sequences[seq_id][image_index].hash

    def slab_of(self, seq_id: int, image_index: int) -> Slab:
        """The pixels of a ready image of a live sequence."""
        slab = self._sequences[seq_id][image_index].slab
        assert slab is not None, (seq_id, image_index)
        return slab

    # --- vision workers -------------------------------------------------------------------------------------------

    def join(self, name: str, segment: str, segment_bytes: int, now: float, shares_memory: bool = True) -> list[Effect]:
        """A vision worker is up. It gets jobs once it has given credits. `name` must not be a live worker's."""
        self._peers.join(VisionPeer(name, segment, segment_bytes, shares_memory))
        self._cache.open(segment, segment_bytes)
        return self._dispatch.advance(now)

    def credit(self, name: str, jobs: int, now: float) -> list[Effect]:
        """The worker can take `jobs` more; a draining one has only got on by so many. Unknown ones are fine."""
        self._dispatch.credit(name, jobs, now)
        return self._dispatch.advance(now)

    def drain(self, name: str) -> list[Effect]:
        """The worker gets no more jobs and is asked to leave. Unknown and already draining ones are fine."""
        peer = self._peers.get(name)
        if peer is None or peer.is_draining:
            return []
        peer.drain()
        return [Send(name, msg.Drain()), *self._release(self._cache.close(peer.segment))]

    def undelivered(self, name: str, message: msg.Message) -> None:
        """The worker did not take this message, and is about to be lost."""
        peer = self._peers.get(name)
        if peer is not None and isinstance(message, msg.Probe | msg.Job):
            peer.untouched.add((message.seq_id, message.image_index, message.epoch))

    def lose(
        self, name: str, now: float, at_work: Collection[JobKey] | None = None, was_counting: bool = False
    ) -> list[Effect]:
        """The worker is gone. Its jobs go to others; its segment stays as long as a live sequence needs it.

        `at_work`: what alone is to blame; None: not known, and if it `was_counting`, maybe an image of no sequence.
        """
        peer = self._peers.leave(name)
        if peer is None:
            return []
        if at_work is not None:
            peer.was_at(at_work)
        peer.was_counting = was_counting and at_work is None
        effects: list[Effect] = []
        for job in self._dispatch.lose(peer, now):
            why = f"vision worker lost: {_in_words(self._limits.attempts_max)} died on it"
            effects += self._fail(job, why, ImageCause.WORKER_LOST)
        effects += self._release(self._cache.close(peer.segment))
        if self._cache.is_leased(peer.segment):
            self._orphans[peer.segment] = peer
        else:
            effects += _unused(peer)
        return effects + self._dispatch.advance(now)

    def stuck(self, now: float) -> list[str]:
        """Workers that have had one thing in hand for too long. To be asked once in a while.

        A worker that waits for room says so again and again (`arena_full`), and its time starts anew.
        """
        return self._dispatch.stuck(now)

    def arena_full(self, name: str, num_bytes: int, now: float, is_memory_full: bool = False) -> list[Effect]:
        """The oldest job of the worker is done, and waits for so many bytes: what is idle there makes room.

        Where all the machine's shared memory is full, what is idle anywhere in it does; what else the worker waits for,
        it does not for ever.
        """
        peer = self._peers.get(name)
        if peer is None or peer.oldest is None:
            return []
        peer.room_wanted, peer.progress_at = num_bytes, now
        if is_memory_full:
            return self._release(self._cache.free_memory(num_bytes))
        freed = self._release(self._cache.make_room(peer.segment, num_bytes))
        effects = freed or self._dispatch.move(peer.oldest, now) or self._break_deadlock(peer, peer.oldest, now)
        peer.was_helped = bool(freed)
        return effects

    # --- what vision workers say ----------------------------------------------------------------------------------

    def fetched(self, name: str, message: msg.Fetched, files: Sequence[memoryview], now: float) -> list[Effect]:
        """The file of a picture, which may turn out to be one that is known."""
        job = self._dispatch.fetched(name, _key(message))
        if job is None:
            return []
        if len(files) != 1 or len(message.content_hash) != HASH_BYTES:
            return self._fail(job, "the vision worker sent no file") + self._dispatch.advance(now)
        self._jobs.receive(job, files[0], message.fetch_s)
        return self._share(job, message.content_hash) + self._dispatch.advance(now)

    def shape(self, name: str, message: msg.Shape, now: float) -> list[Effect]:
        """The size of a picture, and the token ids that take its place."""
        job = self._dispatch.probed(name, _key(message))
        if job is None:
            return []
        known = KnownShape.of(message)
        self._dispatch.know(job, known, now)
        effects: list[Effect] = [_shape_known(image, known) for image in job.images]
        return effects + self._dispatch.advance(now)

    def pixels_in(self, name: str, message: msg.Pixels, frames: Sequence[memoryview], now: float) -> list[Effect]:
        """A picture's tensors are in the sender's segment, or in the one frame that came with the message."""
        key, ref = _key(message), message.pixels
        if not self._dispatch.is_news(name, key):
            return []
        job, is_ours = self._dispatch.made(name, key, now), self._cache.holds(ref)
        give_back: list[Effect] = [] if is_ours else [Send(name, msg.Release(ref.slab))]
        if job is None:
            return give_back
        peer, why = self._peers[name], ""
        if is_ours or ref.segment != peer.segment:
            why = "the vision worker sent pixels in a place that is not its to give"
        elif [frame.nbytes for frame in frames] != ([] if peer.shares_memory else [ref.num_bytes]):
            why = "the vision worker sent other bytes than the pixels it speaks of"
        if why:
            return [*give_back, *self._fail(job, why), *self._dispatch.advance(now)]
        assert job.shape is not None
        self._dispatch.measured(job, message.decode_s + message.process_s)
        stages = _stages(job, message, now)
        images = self._jobs.close(job)
        slab = self._cache.take(ref, job.shape, job.content, *frames)
        effects = [self._make_ready(image, slab, _wait(image, now) if image.is_hit else stages) for image in images]
        return effects + self._dispatch.advance(now)

    def image_failed(self, name: str, message: msg.ImageFailed, now: float) -> list[Effect]:
        """A picture that cannot be used ends the sequences that want it."""
        key = _key(message)
        dispatch = self._dispatch
        job = dispatch.fetched(name, key) or dispatch.probed(name, key) or dispatch.made(name, key, now)
        if job is None:
            return []
        return self._fail(job, f"{message.cause}: {message.detail}", message.cause) + self._dispatch.advance(now)

    # --- what others may ask --------------------------------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        """Pictures that wait for a vision worker."""
        return len(self._jobs) - self._dispatch.num_in_hand

    @property
    def num_workers(self) -> int:
        """Vision workers that take jobs: live, and not asked to leave."""
        return len(self._peers.takers())

    def knows(self, seq_id: int) -> bool:
        """Whether a sequence of this id has images here, or has left a job behind that others wait for."""
        return seq_id in self._sequences or self._jobs.is_named_after(seq_id)

    def refusal(self, files: Sequence[ImageFile], salt: str = "") -> tuple[str, str] | None:
        """Code and detail, as in `Rejected`, of why these files cannot wait here now."""
        new = {salted(file.hash, salt) or b"%d" % index: file.data.nbytes for index, file in enumerate(files)}
        wanted = sum(size for content, size in new.items() if not self._is_known(content))
        taken, most = self._dispatch.bytes_claimed, self._limits.bytes_max
        if wanted > most:
            return "invalid", (
                f"its images have {wanted} bytes together, at most {most} may wait for their pixels "
                "(vision.limits.max_waiting_bytes); send fewer or smaller ones"
            )
        if wanted and taken + wanted > most:
            return "queue_full", (
                f"images with {taken} bytes wait for their pixels, and {wanted} more would be over the limit of {most} "
                "(vision.limits.max_waiting_bytes); try again later"
            )
        return None

    @property
    def bytes_waiting(self) -> int:
        """Of image files whose pixels are not there yet."""
        return self._jobs.num_bytes

    @property
    def cache_bytes(self) -> int:
        """Of pixels that are kept for the next equal picture."""
        return self._cache.idle_bytes

    @property
    def num_hits(self) -> int:
        """Images whose pixels were there, or under way, when they came."""
        return self._num_hits

    @property
    def num_misses(self) -> int:
        """Images whose pixels were not."""
        return self._num_misses

    def load(self, now: float) -> msg.VisionLoad:
        """How long a picture that came now would wait."""
        return self._dispatch.load(now)

    def segment_of(self, name: str) -> str | None:
        """The segment of a vision worker that is here."""
        peer = self._peers.get(name)
        return None if peer is None else peer.segment

    def worker_states(self) -> dict[str, str]:
        """ "draining", "busy" or "ready" by worker."""
        return {peer.name: peer.state for peer in self._peers}

    def jobs_done(self) -> dict[str, int]:
        """Jobs done, well or not, by worker."""
        return {peer.name: peer.jobs_done for peer in self._peers}

    def is_taken(self, segment: str) -> bool:
        """Whether this is the segment of a worker that is here, or of one whose pixels live sequences need."""
        return segment in self._orphans or self._peers.owner_of(segment) is not None

    def needs_segment_of(self, name: str) -> bool:
        """Whether live sequences need pixels in the segment of this lost worker."""
        return any(peer.name == name and peer.shares_memory for peer in self._orphans.values())

    # --- images and their jobs ------------------------------------------------------------------------------------

    def _is_known(self, content: bytes) -> bool:
        """Whether pixels with this content are there, or under way."""
        return self._cache.find(content) is not None or self._jobs.find(content) is not None

    def _settle(self, image: Image, file: ImageFile, salt: str) -> list[Effect]:
        """Where a new image gets its pixels from: a slab, a job that is there, or one of its own."""
        content = of_url(file.url, file.within, salt) if file.url else image.hash
        slab, job = self._cache.find(content), self._jobs.find(content)
        if slab is not None or job is not None:
            return self._share_one(image, slab, job)
        self._num_misses += not file.url  # else it is not known yet
        image.job = PixelJob.of(image, file.url, file.data, salt, file.within)
        self._jobs.open(image.job)
        if file.url:
            self._jobs.share(image.job, content)
        return []

    def _share(self, job: PixelJob, content_hash: bytes) -> list[Effect]:
        """The content of a picture that was fetched is known, and may be that of another."""
        content = salted(content_hash, job.salt)
        for image in job.images:
            image.hash, image.told_hash = content, content_hash
        slab, twin = self._cache.find(content), self._jobs.find(content)
        if slab is None and twin is None:
            self._num_misses += 1
            self._jobs.share(job, content)
            return []
        return [told for image in self._jobs.close(job) for told in self._share_one(image, slab, twin, job.fetch_s)]

    def _share_one(self, image: Image, slab: Slab | None, job: PixelJob | None, fetch_s: float = 0.0) -> list[Effect]:
        """Equal pixels are there, or under way."""
        self._num_hits += not image.is_hit
        image.is_hit = True
        if slab is not None:
            return [_shape_known(image, slab.shape), self._make_ready(image, slab, msg.ImageStages(fetch_s=fetch_s))]
        assert job is not None
        image.job = job
        job.images.append(image)
        return [] if job.shape is None else [_shape_known(image, job.shape)]

    def _make_ready(self, image: Image, slab: Slab, stages: msg.ImageStages) -> PixelsReady:
        image.slab = slab
        self._cache.use(slab)
        return PixelsReady(*image.key, slab.shape.num_tokens, image.is_hit, stages, slab.shape.pixels)

    def _leave(self, image: Image) -> list[Effect]:
        """The image wants its job's pixels no more. Others that wait for it go on waiting for it."""
        job, image.job = image.job, None
        assert job is not None
        job.images.remove(image)
        return [] if job.images else self._dispatch.cancel(job)

    def _fail(self, job: PixelJob, detail: str, cause: str = ImageCause.INTERNAL) -> list[Effect]:
        return [_failed(image, detail, cause) for image in self._jobs.close(job)]

    # --- room in the arenas ---------------------------------------------------------------------------------------

    def _let_go(self, slab: Slab) -> list[Effect]:
        """One image less is ready by a slab. The last one's is kept, unless its worker needs the room or is to go."""
        owner = self._peers.owner_of(slab.ref.segment)
        may_keep = owner is not None and not owner.is_draining and not owner.room_wanted
        return self._release(self._cache.drop(slab, may_keep))

    def _let_go_held(self) -> list[Effect]:
        over = [slab for seq_id, slab in self._held if not self._steps.has(seq_id)]
        self._held = [(seq_id, slab) for seq_id, slab in self._held if self._steps.has(seq_id)]
        return [effect for slab in over for effect in self._let_go(slab)]

    def _release(self, freed: Sequence[Slab]) -> list[Effect]:
        """Gives slabs back; the last one of a worker that is gone frees its segment."""
        effects: list[Effect] = []
        for slab in freed:
            segment = slab.ref.segment
            if slab.data is not None:
                effects.append(ParcelUnused(segment, slab.ref.slab))
            owner = self._peers.owner_of(segment)
            if owner is not None:
                owner.was_helped = True
                effects.append(Send(owner.name, msg.Release(slab.ref.slab)))
            elif segment in self._orphans and not self._cache.is_leased(segment):
                effects += _unused(self._orphans.pop(segment))
        return effects

    def _break_deadlock(self, peer: VisionPeer, job: PixelJob, now: float) -> list[Effect]:
        """Fails one sequence when all that hold room in this worker's segment wait for more, here or elsewhere."""
        read = {slab.ref.segment for _, slab in self._held}
        idle = {other.segment for other in self._peers if self._cache.has_idle(other.segment)}
        if peer not in deadlocked(list(self._peers), self._sequences.values(), read | idle):
            return []
        first = job.images[0].key[0]
        if self._bytes_held(first, peer.segment) + peer.room_wanted > peer.segment_bytes:
            victim, cause = first, ImageCause.ARENA_TOO_SMALL
            why = (
                f"its pixels and those of the request's other images take more than {peer.segment_bytes} bytes "
                "(vision.arena); send fewer or smaller ones"
            )
        else:
            victim = [seq_id for seq_id in self._sequences if self._bytes_held(seq_id, peer.segment)][-1]
            cause = ImageCause.ARENA_FULL
            why = "the vision worker has no room for it: others wait for room as well (vision.arena)"
        image = next(image for image in self._sequences[victim] if image.job is not None)
        return [*self._leave(image), _failed(image, why, cause), *self._dispatch.advance(now)]

    def _bytes_held(self, seq_id: int, segment: str) -> int:
        slabs = {image.slab for image in self._sequences[seq_id] if image.slab is not None}
        return sum(slab.ref.num_bytes for slab in slabs if slab.ref.segment == segment)

    def check(self) -> None:
        """Asserts every invariant."""
        self._dispatch.check()
        self._cache.check()
        images = [image for rows in self._sequences.values() for image in rows]
        assert not any(image.job and image.slab for image in images)
        assert sum(image.job is not None for image in images) == sum(len(job.images) for job in self._jobs)
        assert all(self._steps.has(seq_id) for seq_id, _ in self._held)
        used = Counter([image.slab for image in images if image.slab] + [slab for _, slab in self._held])
        assert all(slab.users == count for slab, count in used.items())
        assert len(used) == self._cache.num_used
        owned = {peer.segment for peer in self._peers}
        assert set(self._orphans) == self._cache.segments() - owned


def _key(message: msg.Fetched | msg.Shape | msg.Pixels | msg.ImageFailed) -> JobKey:
    return message.seq_id, message.image_index, message.epoch


def _shape_known(image: Image, shape: KnownShape) -> ShapeKnown:
    return ShapeKnown(*image.key, shape.expansion, image.told_hash, shape.rope_advance)


def _failed(image: Image, detail: str, cause: str) -> VisionFailed:
    seq_id, image_index = image.key
    return VisionFailed(seq_id, f"image {image_index}: {detail}", cause)


def _unused(peer: VisionPeer) -> list[Effect]:
    return [SegmentUnused(peer.segment)] if peer.shares_memory else []


def _stages(job: PixelJob, pixels: msg.Pixels, now: float) -> msg.ImageStages:
    """Where the time went for the image that the job was made for: all of it, from its arrival to now."""
    return msg.ImageStages(
        fetch_s=job.fetch_s,
        queue_s=max(job.given_at - job.asked_at - job.fetch_s, 0.0),
        decode_s=pixels.decode_s,
        process_s=pixels.process_s,
        transport_s=max(now - job.given_at - pixels.decode_s - pixels.process_s, 0.0),
    )


def _wait(image: Image, now: float) -> msg.ImageStages:
    """The same for an image that joined: it only waited."""
    return msg.ImageStages(queue_s=max(now - image.arrived_at, 0.0))


def _in_words(count: int) -> str:
    return _COUNT_WORDS[count] if count < len(_COUNT_WORDS) else str(count)
