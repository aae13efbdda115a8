"""A tokenized prompt and its pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from airside.proto.image_content import ANY_PIXELS, PixelRange, content_hash


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model is to continue. `image_hashes` has one entry per image, or none until `hash_images` was called."""

    token_ids: Sequence[int]
    image_positions: list[int]
    """Where each image's mark is in `token_ids`, increasing."""
    images: list[bytes]
    """Their files; b"" for one that is to be fetched from `image_urls`."""
    image_urls: list[str] = field(default_factory=list)
    """One entry per image, "" for one that is here; or none."""
    image_hashes: list[bytes] = field(default_factory=list)
    image_ranges: list[PixelRange] = field(default_factory=list)
    """One entry per image, or none."""

    @property
    def min_pixels(self) -> list[int]:
        """As in `messages.AddRequest`."""
        return [within.min_pixels for within in self.image_ranges] if any(map(any, self.image_ranges)) else []

    @property
    def max_pixels(self) -> list[int]:
        """Likewise."""
        return [within.max_pixels for within in self.image_ranges] if any(map(any, self.image_ranges)) else []


def hash_images(images: Sequence[bytes], ranges: Sequence[PixelRange] = ()) -> list[bytes]:
    """What tells equal pictures: a content hash for each file, b"" for one that is not here."""
    return [
        content_hash(image, within) if image else b""
        for image, within in zip(images, ranges or [ANY_PIXELS] * len(images), strict=True)
    ]
