"""What makes two images equal for a model: the file, and within how many pixels it is scaled."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

HASH_BYTES = 16


class PixelRange(NamedTuple):
    """Width times height that a picture is scaled to be within. 0: as the checkpoint says."""

    min_pixels: int = 0
    max_pixels: int = 0


ANY_PIXELS = PixelRange()


def pixel_ranges(min_pixels: Sequence[int], max_pixels: Sequence[int], num_images: int) -> list[PixelRange]:
    """The ranges of a message's images, from its two columns; empty ones: none has any. Raises ValueError."""
    lows, highs = list(min_pixels) or [0] * num_images, list(max_pixels) or [0] * num_images
    if not len(lows) == len(highs) == num_images or min([*lows, *highs, 0]) < 0:
        raise ValueError(f"{num_images} images, but pixel ranges {lows} to {highs}")
    return [PixelRange(*pair) for pair in zip(lows, highs, strict=True)]


def content_hash(data: bytes | memoryview, within: PixelRange = ANY_PIXELS) -> bytes:
    """16 bytes of SHA-256, for which many processors have instructions; equal for equal content."""
    digest = hashlib.sha256(data)
    digest.update(struct.pack("<QQ", *within))
    return digest.digest()[:HASH_BYTES]
