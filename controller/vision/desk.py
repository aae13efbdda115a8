"""Vision workers as they come and go, and the doing of what the ledger of images says is to be done."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from airside.controller.engine_host import EngineHost
from airside.controller.front_desk import FrontDesk
from airside.controller.post import Post
from airside.controller.vision import effects as does
from airside.controller.vision.ledger import VisionLedger, image_files
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
    """

    def __init__(self, images: VisionLedger, host: EngineHost, desk: FrontDesk, post: Post) -> None:
        self._images = images
        self._host = host
        self._desk = desk
        self._post = post

    def add(self, request: msg.AddRequest, attachments: Sequence[memoryview]) -> None:
        """A sequence was accepted; the attachments are its images."""
        if attachments:
            files = image_files(request, attachments)
            self.perform(self._images.add(request.seq_id, files, time.monotonic(), request.cache_salt))

    def end(self, seq_id: int) -> None:
        """A sequence has ended."""
        self.perform(self._images.end(seq_id, time.monotonic()))

    def hear(self, peer: str, message: Said, attachments: Sequence[memoryview], now: float) -> None:
        """What a vision worker says of its work. `now` is of the ledger's clock."""
        match message:
            case msg.Credit():
                self.perform(self._images.credit(peer, message.jobs, now))
            case msg.Fetched():
                self.perform(self._images.fetched(peer, message, attachments, now))
            case msg.Shape():
                self.perform(self._images.shape(peer, message, now))
            case msg.Pixels():
                self.perform(self._images.pixels_in(peer, message, now))
            case msg.ImageFailed():
                self.perform(self._images.image_failed(peer, message, now))
            case msg.ArenaFull():
                self.perform(self._images.arena_full(peer, message.num_bytes, now, message.is_memory_full))

    def may_join(self, peer: str, segment: str) -> bool:
        """Whether a segment's name is new: an earlier owner's pixels may still be read there. If not, says so."""
        if segment != self._images.segment_of(peer) and not self._images.is_orphan(segment):
            return True
        _log.error("vision_worker_refused name=%s segment=%s why=segment_in_use", peer, segment)
        self._post.last_word(peer, msg.Shutdown(f"segment {segment} was used before; choose a new name"))
        return False

    def join(self, peer: str, hello: msg.VisionHello) -> None:
        """A vision worker is up."""
        self.perform(self._images.join(peer, hello.segment, hello.segment_bytes, time.monotonic()))
        _log.info("vision_worker_joined name=%s pid=%d segment=%s", peer, hello.pid, hello.segment)

    def lose(self, peer: str) -> None:
        """A vision worker is gone."""
        segment = self._images.segment_of(peer)
        at_work = None if segment is None else read_marks(segment)
        self.perform(self._images.lose(peer, time.monotonic(), at_work))

    def perform(self, effects: Sequence[does.Effect]) -> None:
        """Does what the ledger says is to be done."""
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
                    self._fail(effect.seq_id, effect.detail)
                case does.SegmentUnused():
                    unlink_segment(effect.segment)

    def _tell_shape(self, shape: does.ShapeKnown) -> None:
        engine = self._host.engine
        assert engine is not None
        try:
            engine.set_shape(shape.seq_id, shape.image_index, shape.expansion, shape.content_hash, shape.rope_advance)
        except ValueError as error:
            self._fail(shape.seq_id, f"image {shape.image_index}: {error}")

    def _tell_ready(self, ready: does.PixelsReady) -> None:
        engine, gateway = self._host.engine, self._desk.gateway_of(ready.seq_id)
        assert engine is not None
        if engine.set_ready(ready.seq_id, ready.image_index) and gateway is not None:
            process_s = ready.stages.decode_s + ready.stages.process_s
            news = msg.ImageReady(
                ready.seq_id, ready.image_index, ready.num_tokens, process_s, ready.is_cached, ready.stages
            )
            self._post.send(gateway, news)

    def _fail(self, seq_id: int, detail: str) -> None:
        assert self._host.engine is not None
        self._host.engine.fail_vision(seq_id, detail)
