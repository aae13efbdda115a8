"""Why a picture cannot be used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from airside.proto.image_cause import ImageCause

log = logging.getLogger(__name__)

T = TypeVar("T")


Cause = ImageCause
"""Its name here."""


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
