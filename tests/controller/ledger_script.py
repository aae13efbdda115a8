"""What the tests of the vision ledger say to it, and how they read what it asks for."""

from __future__ import annotations

from typing import TypeVar

from airside.controller.vision.dispatch import VisionLimits
from airside.controller.vision.effects import Effect, Send
from airside.controller.vision.ledger import ImageFile, VisionLedger
from airside.proto.messages import (
    Job,
    Message,
    Pixels,
    PixelsRef,
    Probe,
    Shape,
)

E = TypeVar("E")
NOW = 100.0
EXPANSION = b"\x07\0\0\0" * 5
SMALL, LARGE = 10_000, 4_000_000  # pixels
ARENA_BYTES = 1000
CACHING = VisionLimits(cache_bytes=10_000)


def of(kind: type[E], effects: list[Effect]) -> list[E]:
    return [effect for effect in effects if isinstance(effect, kind)]


def sent(kind: type[Message], effects: list[Effect]) -> list[tuple[str, tuple[int, ...]]]:
    """To whom messages of this kind go, and what they are about."""
    keys = [(s.peer, s.message) for s in of(Send, effects) if isinstance(s.message, kind)]
    return [(peer, (m.seq_id, m.image_index, m.epoch)) for peer, m in keys]  # type: ignore[attr-defined]


def jobs(effects: list[Effect]) -> list[tuple[str, tuple[int, ...]]]:
    return sent(Job, effects)


def probes(effects: list[Effect]) -> list[tuple[str, tuple[int, ...]]]:
    return sent(Probe, effects)


def ledger_with(*workers: tuple[str, int], limits: VisionLimits = CACHING) -> VisionLedger:
    ledger = VisionLedger(limits)
    for name, credits in workers:
        ledger.join(name, f"airside-t-{name}", ARENA_BYTES, NOW)
        ledger.credit(name, credits, NOW)
    return ledger


def files(count: int) -> list[ImageFile]:
    """Pictures that nobody can know to be equal."""
    return [ImageFile(memoryview(b"image %d" % index)) for index in range(count)]


def known(content: int, size: int = 9) -> ImageFile:
    return ImageFile(memoryview(bytes(size)), "", b"%016d" % content)


def shape(seq_id: int, index: int, epoch: int = 1, pixels: int = SMALL) -> Shape:
    return Shape(seq_id, index, epoch, EXPANSION, pixels, 1, 3)


def pixels(worker: str, seq_id: int, index: int, epoch: int = 1, slab: int = 0, num_bytes: int = 64) -> Pixels:
    ref = PixelsRef(f"airside-t-{worker}", slab, num_bytes, [])
    return Pixels(seq_id, index, epoch, ref, 0.25, 0.5)


def add(ledger: VisionLedger, seq_id: int, *given: ImageFile, size: int = SMALL, now: float = NOW) -> list[Effect]:
    """A new sequence; its probes are answered at once."""
    effects = ledger.add(seq_id, list(given), now)
    for worker, key in probes(effects):
        effects += ledger.shape(worker, shape(*key, pixels=size), now)
    return effects


def done(
    ledger: VisionLedger, worker: str, *key: int, slab: int = 0, num_bytes: int = 64, now: float = NOW
) -> list[Effect]:
    """A job's pixels and its credit."""
    effects = ledger.pixels_in(worker, pixels(worker, *key, slab=slab, num_bytes=num_bytes), [], now)
    return effects + ledger.credit(worker, 1, now)
