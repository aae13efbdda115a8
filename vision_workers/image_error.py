"""Why a picture cannot be used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import StrEnum
from typing import TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


class Cause(StrEnum):
    """Short stable words, fit for a metric label. Users see them; none is ever renamed."""

    EMPTY = "empty"
    UNSUPPORTED_FORMAT = "unsupported_format"
    TRUNCATED = "truncated"
    DAMAGED = "damaged"
    TOO_MANY_BYTES = "too_many_bytes"
    TOO_MANY_PIXELS = "too_many_pixels"
    TOO_EXTREME_ASPECT = "too_extreme_aspect"
    ARENA_TOO_SMALL = "arena_too_small"
    MEMORY_FULL = "memory_full"  # the machine's shared memory
    NOT_ALLOWED = "not_allowed"  # its URL
    FETCH_FAILED = "fetch_failed"
    FETCH_TIMEOUT = "fetch_timeout"
    INTERNAL = "internal"


class ImageError(Exception):
    """A picture that cannot be used; `detail` is a sentence for the user, without any of the picture's bytes."""

    def __init__(self, cause: Cause, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause
        self.detail = detail


def attempt(work: Callable[[], T]) -> T | ImageError:
    """What `work` returns, or why this one picture cannot be used. Unexpected errors are logged, with their trace."""
    try:
        return work()
    except ImageError as error:
        return error
    except Exception as error:
        log.exception("processing a picture failed unexpectedly")
        return ImageError(Cause.INTERNAL, f"the vision worker failed on this picture ({type(error).__name__})")
