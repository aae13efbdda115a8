"""The C library's heap, which keeps what is freed in case that it is wanted again."""

from __future__ import annotations

import ctypes


def give_back_free_memory() -> None:
    """To the system; for after a phase that needed much. Does nothing where the C library cannot."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
