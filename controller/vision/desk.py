"""Vision workers as they come and go, and the doing of what the ledger of images says is to be done."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

from airside.controller.engine_host import EngineHost
from airside.controller.front_desk import FrontDesk
from airside.controller.post import Post
from airside.controller.vision import effects as does
from airside.controller.vision.busy_time import BusyTime
from airside.controller.vision.embedding_tally import EmbeddingTally
from airside.controller.vision.header_counts import HeaderCounts
from airside.controller.vision.ledger import VisionLedger, image_files
from airside.controller.vision.parcels import Parcels
from airside.controller.vision.segments import unlink_segment
from airside.proto import messages as msg
from airside.proto.work_marks import read_marks

Said = msg.Credit | msg.Fetched | msg.Shape | msg.Pixels | msg.ImageFailed | msg.ArenaFull
"""What a vision worker says of its work."""

_log = logging.getLogger(__name__)


class VisionDesk:
    """Between the ledger, which is pure, and the engine, the gateways and the vision workers.

    Args:
        images: the ledger.
        host: has the engine.
        desk: knows whose a sequence is.
        post: where messages go.
        count_bytes_max: of image files whose tokens are only counted.
    """

    def __init__(
        self, images: VisionLedger, host: EngineHost, desk: FrontDesk, post: Post, count_bytes_max: int
    ) -> None:
        self._images = images
        self._host = host
        self._desk = desk
        self._post = post
        self._parcels = Parcels()
        self._busy = BusyTime(time.monotonic())
        self._counts = HeaderCounts(count_bytes_max)
        self.embeddings = EmbeddingTally()
        self.causes: dict[int, str] = {}
        """Why the sequences failed that an image has ended, until `end`: the engine knows only the words for people."""

    def add(self, request: msg.AddRequest, attachments: Sequence[memoryview]) -> None:
        """A sequence was accepted; the attachments are its images."""
        if attachments:
            files = image_files(request, attachments)
            self.perform(self._images.add(request.seq_id, files, time.monotonic(), request.cache_salt))

    def end(self, seq_id: int) -> None:
        """A sequence has ended."""
        self.causes.pop(seq_id, None)
        self.perform(self._images.end(seq_id, time.monotonic()))

    def count(self, gateway: str, query: msg.CountImages, files: Sequence[memoryview]) -> None:
        """A gateway asks how many tokens these images take."""
        self.perform(self._counts.open(gateway, query, files, self._takers()))

    def forget(self, gateway: str) -> None:
        """A gateway is gone."""
        self._counts.forget(gateway)

    def send_pixels(self, images: Iterable[tuple[int, int]]) -> None:
        """Sends the ranks what a plan reads and they cannot map, unless they have it; before the plan itself.

        `images`: (seq_id, image_index) of each.
        """
        slabs = (self._images.slab_of(seq_id, image_index) for seq_id, image_index in images)
        for slab in self._parcels.take_missing(slabs):
            ref, data = slab.ref, slab.data
            assert data is not None, ref
            self._tell_ranks(msg.PixelsParcel(ref.segment, ref.slab, ref.num_bytes), [data])

    def lose_launch(self) -> None:
        """The ranks are gone: no step reads pixels, and the next ranks have got none."""
        self._parcels.clear()
        self.embeddings.lose()
        self.perform(self._images.drop_steps())

    def hear(self, peer: str, message: Said, attachments: Sequence[memoryview], now: float) -> None:
        """What a vision worker says of its work. `now` is of the ledger's clock."""
        match message:
            case msg.Shape() | msg.ImageFailed() if self._counts.is_ours(message):
                self.perform(self._counts.hear(peer, message))
            case msg.Credit():
                self.perform(self._images.credit(peer, message.jobs, now))
            case msg.Fetched():
                self.perform(self._images.fetched(peer, message, attachments, now))
            case msg.Shape():
                self.perform(self._images.shape(peer, message, now))
            case msg.Pixels():
                self.perform(self._images.pixels_in(peer, message, attachments, now))
            case msg.ImageFailed():
                self.perform(self._images.image_failed(peer, message, now))
            case msg.ArenaFull():
                self.perform(self._images.arena_full(peer, message.num_bytes, now, message.is_memory_full))

    def may_join(self, peer: str, segment: str) -> bool:
        """Whether a segment's name is new: another owner's pixels may still be read there. If not, says so."""
        if not self._images.is_taken(segment):
            return True
        _log.error("vision_worker_refused name=%s segment=%s why=segment_in_use", peer, segment)
        self._post.last_word(peer, msg.Shutdown(f"segment {segment} was used before; choose a new name"))
        return False

    def join(self, peer: str, hello: msg.VisionHello) -> None:
        """A vision worker is up."""
        segment, shares_memory = hello.segment, hello.shares_memory
        self.perform(self._images.join(peer, segment, hello.segment_bytes, time.monotonic(), shares_memory))
        self._note_busy()
        where = "shared" if shares_memory else "sent"
        _log.info("vision_worker_joined name=%s pid=%d segment=%s pixels=%s", peer, hello.pid, segment, where)

    def lose(self, peer: str) -> None:
        """A vision worker is gone."""
        segment = self._images.segment_of(peer)
        at_work = None if segment is None else read_marks(segment)
        was_counting = self._counts.has_asked(peer)
        self.perform(self._images.lose(peer, time.monotonic(), at_work, was_counting))
        self.perform(self._counts.lose(peer, self._takers()))
        self._note_busy()

    def tell_encoded(self, rows: Sequence[msg.EncodedRow]) -> None:
        """Tells gateways of the embeddings of their sequences' images; before the ends that the same step brings."""
        self.embeddings.note(rows)
        for row in rows:
            gateway = self._desk.gateway_of(row.seq_id)
            if gateway is not None:
                self._post.send(gateway, msg.ImageEncoded(row.seq_id, row.image_index, row.encode_s))

    def busy_ratio(self, now: float) -> float:
        """The share of the time just past in which vision workers had an image in hand."""
        return self._busy.ratio(now)

    def perform(self, effects: Sequence[does.Effect]) -> None:
        """Does what the ledger says is to be done."""
        if effects:  # else no image has changed hands
            self._note_busy()
        for effect in effects:
            match effect:
                case does.Send():
                    if not self._post.send(effect.peer, effect.message, effect.attachments):
                        self._images.undelivered(effect.peer, effect.message)
                case does.ShapeKnown():
                    self._tell_shape(effect)
                case does.PixelsReady():
                    self._tell_ready(effect)
                case does.VisionFailed():
                    self._fail(effect)
                case does.SegmentUnused():
                    unlink_segment(effect.segment)
                case does.ParcelUnused():
                    if self._parcels.forget(effect.segment, effect.slab):
                        self._tell_ranks(msg.DropPixels(effect.segment, effect.slab))

    def _tell_ranks(self, message: msg.Message, attachments: Sequence[memoryview] = ()) -> None:
        self._post.send_frame(self._host.ranks, msg.encode(message), attachments)

    def _takers(self) -> list[str]:
        return [name for name, state in self._images.worker_states().items() if state != "draining"]

    def _note_busy(self) -> None:
        states = list(self._images.worker_states().values())
        num_busy = states.count("busy")
        self._busy.note(time.monotonic(), num_busy, num_busy + states.count("ready"))

    def _tell_shape(self, shape: does.ShapeKnown) -> None:
        engine = self._host.engine
        assert engine is not None
        try:
            engine.set_shape(shape.seq_id, shape.image_index, shape.expansion, shape.content_hash, shape.rope_advance)
        except (ValueError, TypeError) as error:  # TypeError: a number that no rope position can have
            self._fail(does.VisionFailed(shape.seq_id, f"image {shape.image_index}: {error}"))

    def _tell_ready(self, ready: does.PixelsReady) -> None:
        engine, gateway = self._host.engine, self._desk.gateway_of(ready.seq_id)
        assert engine is not None
        if engine.set_ready(ready.seq_id, ready.image_index) and gateway is not None:
            process_s = ready.stages.decode_s + ready.stages.process_s
            news = msg.ImageReady(
                ready.seq_id,
                ready.image_index,
                ready.num_tokens,
                process_s,
                ready.is_cached,
                ready.stages,
                ready.pixels,
            )
            self._post.send(gateway, news)

    def _fail(self, failed: does.VisionFailed) -> None:
        assert self._host.engine is not None
        if self._host.engine.fail_vision(failed.seq_id, failed.detail):
            self.causes[failed.seq_id] = failed.cause
