"""Byte counts with units, as people write them in configuration: 64MiB, 1.5GB, 4096."""

from __future__ import annotations

import re

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}b": 1000 ** (power + 1) for power, letter in enumerate("kmgt")}
_UNITS |= {f"{letter}ib": 1024 ** (power + 1) for power, letter in enumerate("kmgt")}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")


def parse_bytes(value: object) -> int:
    """The number of bytes in 4096 or "64MiB". Units: B, kB, MB, GB, TB and KiB, MiB, GiB, TiB, in any case.

    Raises:
        ValueError: not a byte count, or less than one byte.
    """
    match = _PATTERN.fullmatch(str(value).strip().lower()) if isinstance(value, int | str) else None
    if isinstance(value, bool) or match is None or match[2] not in _UNITS:
        raise ValueError('must be a number of bytes with a unit, such as "64MiB"')
    num_bytes = int(float(match[1]) * _UNITS[match[2]])
    if num_bytes < 1:
        raise ValueError("must be at least 1 byte")
    return num_bytes


def format_bytes(num_bytes: int) -> str:
    """The shortest exact text that `parse_bytes` reads back: 67108864 is "64MiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        size = _UNITS[unit.lower()]
        if num_bytes >= size and num_bytes % size == 0:
            return f"{num_bytes // size}{unit}"
    return f"{num_bytes}B"


def format_rough_bytes(num_bytes: int) -> str:
    """Three digits or so, for people: "61.2 MiB"."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"
