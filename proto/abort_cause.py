"""Why a sequence was ended from outside: the words in which one process tells another, and at last the client."""

from __future__ import annotations

from enum import StrEnum


class AbortCause(StrEnum):
    """How the detail of an end with the reason "abort" begins. What may follow, after a colon, is for people alone.

    Two of them are the engine's own words as well (`csrc/engine/engine.cpp`, `ending.cpp`).
    """

    DEADLINE = "deadline"
    MODEL_FAILED = "the model failed"
    CLIENT_GONE = "the client cancelled or is gone"
    CLIENT_SLOW = "the client stopped reading"
    BY_NAME = "aborted by Control.Abort"
    CALL_INTERRUPTED = "the call of generate was interrupted"
    GATEWAY_LOST = "the gateway was lost"
    SHUTDOWN = "server is shutting down"

    @classmethod
    def of(cls, detail: str) -> AbortCause | None:
        """The cause that a detail begins with; None: it is none of these."""
        head = detail.partition(": ")[0]
        return next((cause for cause in cls if cause == head), None)
