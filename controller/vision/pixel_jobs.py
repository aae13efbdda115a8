"""Pictures that are still to be made, and the images that wait for them. Pure.

    REMOTE ──Probe with a URL──> FETCHING ──Fetched──┐
                                                     v
    ────────────────────────────────────────────> UNKNOWN ──Probe──> PROBING ──Shape──┐
                                                     ┌────────────────────────────────┘
                                                     v
                                                  QUEUED ──Job──> PROCESSING ──Pixels──> OVER

    A lost worker takes a job one state back.

A job makes the pixels of one picture, for every image with that content: the second one joins it. A lost worker costs
an attempt only the job that it is blamed on; at the last one the job fails, and its images with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from airside.proto.image_content import ANY_PIXELS, PixelRange
from airside.proto.messages import Shape
from airside.proto.work_marks import JobKey

if TYPE_CHECKING:
    from airside.controller.vision.pixel_cache import Slab

ImageKey = tuple[int, int]
"""(seq_id, image_index)"""

_PIXELS_MAX = 2**63 - 1


class JobState(Enum):
    """Where a job is; see the drawing above."""

    REMOTE = auto()
    FETCHING = auto()
    UNKNOWN = auto()
    PROBING = auto()
    QUEUED = auto()
    PROCESSING = auto()
    OVER = auto()


_NEXT = {
    JobState.REMOTE: (JobState.FETCHING, JobState.OVER),
    JobState.FETCHING: (JobState.REMOTE, JobState.UNKNOWN, JobState.OVER),
    JobState.UNKNOWN: (JobState.PROBING, JobState.OVER),
    JobState.PROBING: (JobState.UNKNOWN, JobState.QUEUED, JobState.OVER),
    JobState.QUEUED: (JobState.PROCESSING, JobState.OVER),
    JobState.PROCESSING: (JobState.QUEUED, JobState.OVER),
    JobState.OVER: (),
}


@dataclass(frozen=True, slots=True)
class KnownShape:
    """What a header has told."""

    expansion: bytes  # i32
    pixels: int  # width times height
    rope_advance: int = 0

    @classmethod
    def of(cls, told: Shape) -> KnownShape:
        """As a vision worker tells it, whatever that is: at least one pixel, and as many as a message has room for."""
        return cls(told.expansion, min(max(told.width * told.height, 1), _PIXELS_MAX), told.rope_advance)

    @property
    def num_tokens(self) -> int:
        """Tokens that take the place of the picture's mark."""
        return len(self.expansion) // 4


@dataclass(slots=True, eq=False)
class Image:
    """One image of one live sequence: it waits for its job, or is ready by a slab, or, with neither, has failed."""

    key: ImageKey
    arrived_at: float
    hash: bytes  # 16 bytes, equal for equal pictures of the same salt; b"": not known
    told_hash: bytes = b""  # what the engine must be told of the content, of a picture that was fetched
    is_hit: bool = False  # its pixels were there, or under way, when it came
    job: PixelJob | None = None
    slab: Slab | None = None


@dataclass(slots=True, eq=False)
class PixelJob:
    """The making of one picture. It keeps the name of the image that asked first, also when that one is gone."""

    name: ImageKey
    url: str  # "": `data` was there from the start
    salt: str  # of the requests that may share it
    data: memoryview | None  # the file; a fetched one comes with its shape
    content: bytes  # equal for equal pictures that may be shared; b"": not known, and shared with nobody. Of its URL
    # until it is fetched
    asked_at: float
    state: JobState
    epoch: int = 1  # grows each time it is taken from a vision worker
    blamed: int = 0  # vision workers that were lost, and it may be why
    witnessed: int = 0  # lost workers that were making it, or looking into it
    was_moved: bool = False  # to a worker with more room
    worker: str | None = None  # who has it; set exactly while FETCHING, PROBING or PROCESSING
    probed_at: float = 0.0  # to fetch it, or for its size
    fetch_s: float = 0.0
    due: float = 0.0  # its turn in the queue: when it became known, later for a large one
    given_at: float = 0.0
    shape: KnownShape | None = None
    images: list[Image] = field(default_factory=list)  # that wait for it, the oldest first
    within: PixelRange = ANY_PIXELS

    @classmethod
    def of(cls, image: Image, url: str, data: memoryview, salt: str, within: PixelRange = ANY_PIXELS) -> PixelJob:
        """A new job for an image that nobody makes yet."""
        state = JobState.REMOTE if url else JobState.UNKNOWN
        kept = None if url else data
        return cls(image.key, url, salt, kept, image.hash, image.arrived_at, state, images=[image], within=within)

    @property
    def key(self) -> JobKey:
        """As messages name it."""
        return (*self.name, self.epoch)

    @property
    def is_suspect(self) -> bool:
        """Whether it may be what ended a worker: it is tried alone from then on."""
        return self.witnessed > 0

    @property
    def pixels(self) -> int:
        """Its size, once that is known."""
        return 0 if self.shape is None else self.shape.pixels

    @property
    def num_bytes(self) -> int:
        """Of its file, as long as that is kept."""
        return 0 if self.data is None else self.data.nbytes

    def become(self, state: JobState) -> None:
        """The one place where a job changes its state."""
        assert state in _NEXT[self.state], f"{self.name}: {self.state} -> {state}"
        self.state = state
