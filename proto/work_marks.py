"""What a vision worker is looking into, as it says in the header of its segment: readable also when it is dead.

    24                                  48                                  72
    | header it reads: 3 u64, the key   | picture it makes: 3 u64, the key  |

A key of zeros: nothing. The owner writes, in its own process; the controller reads when the owner is lost.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from pathlib import Path

JobKey = tuple[int, int, int]
"""(seq_id, image_index, epoch), the first epoch is 1: what messages from and to a vision worker are about"""

_BEGIN = 24
_KEY = struct.Struct("<QQQ")
_NOTHING = (0, 0, 0)
_FOLDER = Path("/dev/shm")


class Work(IntEnum):
    """The two things that a picture may end a worker by, which it does side by side."""

    HEADER = 0
    PICTURE = 1


def mark(work: Work, key: JobKey | None) -> tuple[slice, bytes]:
    """Where in the segment it is said that this is being looked into (None: nothing), and how."""
    begin = _BEGIN + work * _KEY.size
    return slice(begin, begin + _KEY.size), _KEY.pack(*(key or _NOTHING))


def read_marks(segment: str) -> frozenset[JobKey] | None:
    """What the owner of a segment was looking into at its end; None: there is no such segment here to say so."""
    if "/" in segment:  # it came over the bus
        return None
    try:
        with (_FOLDER / segment).open("rb") as file:
            header = file.read(_BEGIN + len(Work) * _KEY.size)
    except (OSError, ValueError):  # ValueError: the name has a zero in it
        return None
    if len(header) < _BEGIN + len(Work) * _KEY.size:
        return None
    return frozenset(_KEY.iter_unpack(header[_BEGIN:])) - {_NOTHING}
