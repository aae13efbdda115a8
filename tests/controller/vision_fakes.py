"""What a simulated world of pictures is made of: the pictures, vision workers as they behave, and sequences."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from airside.proto import messages as msg
from airside.vision_workers.slabs import Slabs

ARENA_BYTES = 64 * 64


@dataclass(frozen=True)
class Picture:
    """A file. What it does to a worker depends on nothing else."""

    number: int
    pixels: int
    slab_bytes: int
    fate: str  # "fine", "damaged", "no_header", "kills", "kills_prober", "hangs"

    @property
    def data(self) -> bytes:
        return b"picture %d" % self.number

    @property
    def hash(self) -> bytes:
        return b"%016d" % self.number

    @property
    def tensors(self) -> bytes:
        return bytes([self.number]) * self.slab_bytes


@dataclass
class FakeJob:
    key: tuple[int, int, int]
    picture: Picture
    done_at: float | None = None  # once it is worked on
    is_wanted: bool = True


@dataclass
class FakeWorker:
    """As the real one behaves, seen from the bus."""

    name: str
    shares_memory: bool
    slabs: Slabs = field(default_factory=lambda: Slabs(0, ARENA_BYTES))
    jobs: deque[FakeJob] = field(default_factory=deque)
    contents: dict[int, int] = field(default_factory=dict)  # by slab: whose pixels
    probing: set[int] = field(default_factory=set)  # pictures it was ever asked about
    is_dead: bool = False
    is_stopped: bool = False  # lives on without a word
    is_troubled: bool = False  # it was killed or stopped, and no picture is to blame
    is_lost: bool = False  # the ledger was told
    is_draining: bool = False
    said: list[msg.Message] = field(default_factory=list)
    next_arrival: float = 0.0  # messages keep their order
    next_word: float = 0.0

    @property
    def segment(self) -> str:
        return f"airside-t-{self.name}"


@dataclass
class FakeSequence:
    pictures: list[Picture]
    arrived: float
    shaped: set[int] = field(default_factory=set)
    ready: dict[int, tuple[str, int]] = field(default_factory=dict)  # image -> (segment, slab)
    failed: str = ""
