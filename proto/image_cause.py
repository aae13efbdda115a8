"""Why an image ended its sequence: the words in which one process tells another. A gateway makes statuses of them."""

from __future__ import annotations

from enum import StrEnum


class ImageCause(StrEnum):
    """Short stable words, fit for a metric label. Users see them; none is ever renamed.

    Vision workers say them of a picture (`ImageFailed`), or the controller says them itself.
    """

    EMPTY = "empty"
    UNSUPPORTED_FORMAT = "unsupported_format"
    TRUNCATED = "truncated"
    DAMAGED = "damaged"
    TOO_MANY_BYTES = "too_many_bytes"
    TOO_MANY_PIXELS = "too_many_pixels"
    TOO_EXTREME_ASPECT = "too_extreme_aspect"
    BAD_PIXEL_RANGE = "bad_pixel_range"  # its min_pixels or max_pixels
    ARENA_TOO_SMALL = "arena_too_small"  # for its tensors, or for those of all the request's images together
    ARENA_FULL = "arena_full"  # of what requests hold that wait for one another
    MEMORY_FULL = "memory_full"  # the machine's shared memory
    NOT_ALLOWED = "not_allowed"  # its URL
    FETCH_FAILED = "fetch_failed"
    FETCH_TIMEOUT = "fetch_timeout"
    WORKER_LOST = "worker_lost"  # too many vision workers were lost to it
    INTERNAL = "internal"
