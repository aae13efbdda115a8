"""The bytes of one picture file, as the decoders read them."""

from __future__ import annotations

import io

from airside.vision_workers.image_error import Cause, ImageError

READS_MAX = 100_000
"""Forty times what a 20 MB PNG in chunks of 8 KB takes; some tenths of a second when each read is in vain."""


class PictureFile(io.BytesIO):
    """A file in memory that ends a reader's patience for it: its reads are bounded.

    Pillow walks chunks, markers and comments in Python. A file of 20 MB can hold millions of empty ones, which take
    ten seconds to walk, in the loop that answers for every other picture too.
    """

    def __init__(self, data: bytes | memoryview) -> None:
        super().__init__(data)
        self._reads_left = READS_MAX

    def read(self, size: int | None = -1, /) -> bytes:
        """As of any file. Raises ImageError when there have been `READS_MAX` reads before."""
        if self._reads_left == 0:
            raise ImageError(Cause.DAMAGED, f"the file is cut into more than {READS_MAX} pieces")
        self._reads_left -= 1
        return super().read(size)
