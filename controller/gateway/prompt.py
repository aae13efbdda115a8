"""A tokenized prompt and its pictures."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

HASH_BYTES = 16


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


def hash_images(images: Sequence[bytes]) -> list[bytes]:
    """What tells equal pictures: 16 bytes of BLAKE2b over each file, b"" for one that is not here.

    Options join it when pictures have some.
    """
    return [hashlib.blake2b(image, digest_size=HASH_BYTES).digest() if image else b"" for image in images]
