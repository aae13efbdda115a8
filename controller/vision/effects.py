"""What the vision ledger asks for. It does nothing itself: its methods return these, and `VisionDesk` performs them."""

from __future__ import annotations

from dataclasses import dataclass

from airside.proto.image_cause import ImageCause
from airside.proto.messages import ImageStages, Message


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
    content_hash: bytes = b""  # of a picture that was fetched; b"": the request has said it
    rope_advance: int = 0  # by how much positions go on over the picture; 0: by the number of its tokens


@dataclass(frozen=True, slots=True)
class PixelsReady:
    """The engine and the front end may be told that an image is ready. At most once per image, after `ShapeKnown`."""

    seq_id: int
    image_index: int
    num_tokens: int
    is_cached: bool  # its pixels were there, or under way for another image
    stages: ImageStages
    pixels: int  # width times height of the picture


@dataclass(frozen=True, slots=True)
class VisionFailed:
    """The sequence cannot go on: one of its images failed. At most once per image."""

    seq_id: int
    detail: str  # for people
    cause: str = ImageCause.INTERNAL  # a word of `ImageCause`, or one that a newer vision worker has


@dataclass(frozen=True, slots=True)
class SegmentUnused:
    """The shared memory of a vision worker that is gone holds no pixels that anybody needs."""

    segment: str


@dataclass(frozen=True, slots=True)
class ParcelUnused:
    """Ranks that have got the bytes of this slab may forget them; before another comes in its place."""

    segment: str
    slab: int


Effect = Send | ShapeKnown | PixelsReady | VisionFailed | SegmentUnused | ParcelUnused
