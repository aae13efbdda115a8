"""What makes two images equal: all of the file, and the range of pixels."""

from __future__ import annotations

import hashlib

from airside.proto.image_content import HASH_BYTES, PixelRange, content_hash


def test_all_of_the_content_counts_and_nothing_else() -> None:
    files = [b"", b"a", b"b", b"ab", bytes(16)]
    ranges = [PixelRange(), PixelRange(0, 1), PixelRange(1, 0), PixelRange(1, 2)]
    hashes = {content_hash(file, within) for file in files for within in ranges}
    assert len(hashes) == len(files) * len(ranges)
    assert {len(one) for one in hashes} == {HASH_BYTES}
    assert content_hash(memoryview(b"ab")) == content_hash(b"ab")


def test_it_is_the_beginning_of_a_sha256() -> None:
    """In every process of a run, whatever its version of Python."""
    assert (
        content_hash(b"ab", PixelRange(1, 2))
        == hashlib.sha256(b"ab" + b"\1" + bytes(7) + b"\2" + bytes(7)).digest()[:16]
    )
