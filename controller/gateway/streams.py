"""Where the controller's news about a sequence waits for the call that reads it.

One `Stream` per live sequence. Its buffer is bounded: it never holds more than `TOKENS_MAX` tokens that the client has
not taken; new tokens join the ones that wait, so their number is the only thing that grows. A stream that would
overflow takes no more tokens and its sequence is aborted: the client gets what was buffered, then the end.

    controller ── OutputBatch ──> Streams.dispatch ──> Stream (≤ TOKENS_MAX) ──> call ──> gRPC flow control ──> client
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from airside.proto.messages import Accepted, FinishedRow, ImageReady, Message, OutputBatch, Rejected

TOKENS_MAX = 4096
"""Tokens of one sequence that may wait for a client which has stopped reading."""


@dataclass(slots=True)
class Tokens:
    """Consecutive new tokens of a sequence."""

    ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Lost:
    """The controller that knew this sequence is gone."""

    detail: str


News = Accepted | Rejected | ImageReady | Tokens | FinishedRow | Lost


_END = (Rejected, FinishedRow, Lost)


class Stream:
    """News of one sequence, in order, up to its one end: what comes after that is dropped. One reader."""

    def __init__(self, seq_id: int) -> None:
        self.seq_id = seq_id
        self.overflowed = False
        self._has_end = False  # the end is among the news, or was taken
        self._news: list[News] = []
        self._arrived = asyncio.Event()

    def put(self, news: News) -> None:
        """Appends news other than tokens: at most one per image, and two more, in a sequence's life."""
        if self._has_end:
            return
        self._has_end = isinstance(news, _END)
        self._news.append(news)
        self._arrived.set()

    def put_tokens(self, ids: list[int]) -> bool:
        """Appends tokens. False, once: the reader is too far behind and the stream takes no more of them."""
        if self.overflowed or self._has_end:
            return True
        waiting = self._waiting_tokens()
        if len(waiting.ids) + len(ids) > TOKENS_MAX:
            self.overflowed = True
            return False
        waiting.ids.extend(ids)
        self._arrived.set()
        return True

    async def take(self) -> list[News]:
        """Waits for news and takes all there is."""
        await self._arrived.wait()
        self._arrived.clear()
        news, self._news = self._news, []
        return news

    def _waiting_tokens(self) -> Tokens:
        last = self._news[-1] if self._news else None
        if isinstance(last, Tokens):
            return last
        self._news.append(tokens := Tokens())
        return tokens


class Streams:
    """All live sequences of this gateway.

    Args:
        abort: told the sequence and the cause when a stream overflows.
    """

    def __init__(self, abort: Callable[[int, str], None]) -> None:
        self._abort = abort
        self._streams: dict[int, Stream] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, seq_id: int) -> Stream:
        """The stream of a new sequence; must be closed."""
        assert seq_id not in self._streams
        stream = self._streams[seq_id] = Stream(seq_id)
        self._idle.clear()
        return stream

    def close(self, seq_id: int) -> None:
        """Later news of this sequence will be dropped: nobody waits for it."""
        del self._streams[seq_id]
        if not self._streams:
            self._idle.set()

    async def drained(self) -> None:
        """Waits until there is no live sequence."""
        await self._idle.wait()

    def lose_all(self, detail: str) -> None:
        """Ends every stream: the controller that knew these sequences is gone."""
        for stream in self._streams.values():
            stream.put(Lost(detail))

    def dispatch(self, message: Message) -> bool:
        """Hands a message of the controller to the streams it is about. False: it is about none."""
        match message:
            case OutputBatch():
                self._dispatch_batch(message)
            case Accepted() | Rejected() | ImageReady():
                self._put(message.seq_id, message)
            case _:
                return False
        return True

    def _put(self, seq_id: int, news: News) -> None:
        stream = self._streams.get(seq_id)
        if stream is not None:
            stream.put(news)

    def _dispatch_batch(self, batch: OutputBatch) -> None:
        for seq_id, token_ids in batch.rows():
            stream = self._streams.get(seq_id)
            if stream is not None and not stream.put_tokens(token_ids):
                self._abort(seq_id, f"the client stopped reading: {TOKENS_MAX} tokens wait for it")
        for row in batch.finished:
            self._put(row.seq_id, row)
