"""Shared-memory segments whose owner is gone."""

from __future__ import annotations

import logging
from pathlib import Path

_FOLDER = Path("/dev/shm")
_PREFIX = "airside-"

_log = logging.getLogger(__name__)


def unlink_segment(name: str, folder: Path = _FOLDER) -> bool:
    """Removes a segment's name; memory that is still mapped stays valid. False when there was nothing to remove.

    Names that are not a segment of ours are refused: the name came over the bus.
    """
    if not name.startswith(_PREFIX) or "/" in name:
        _log.warning("segment_refused name=%r", name)
        return False
    try:
        (folder / name).unlink()
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:  # too long, with a zero in it, of another user
        _log.warning("segment_left name=%r why=%s", name, error)
        return False
    _log.info("segment_unlinked name=%s", name)
    return True
