"""What equal pictures are found by. Pure."""

from __future__ import annotations

import hashlib

from airside.proto.image_content import HASH_BYTES, PixelRange, content_hash


def salted(content: bytes, salt: str) -> bytes:
    """The content as pixels and embeddings are shared by; a salt keeps what equal pictures cost from other users."""
    if not content or not salt:
        return content
    return hashlib.blake2b(
        content, key=hashlib.blake2b(salt.encode(), digest_size=32).digest(), digest_size=HASH_BYTES
    ).digest()


def of_url(url: str, within: PixelRange, salt: str) -> bytes:
    """By what a file is found while it is fetched, so that the continuations of a request fetch it once.

    Longer than a content, of which no file can therefore have it.
    """
    return b"url" + salted(content_hash(url.encode(), within), salt)
