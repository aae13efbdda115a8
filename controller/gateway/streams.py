"""Where the controller's news about a sequence waits for the call that reads it.

One `Stream` per live sequence. Its buffer is bounded: it never holds more than `TOKENS_MAX` tokens that the client has
not taken; new tokens join the ones that wait, with their log-probabilities, so their number is the only thing that
grows. A stream that would overflow takes no more tokens and its sequence is aborted: the client gets what was buffered,
then that end. Log-probabilities of the prompt are at most one record for each of its tokens, once.

    controller ── OutputBatch ──> Streams.dispatch ──> Stream (≤ TOKENS_MAX) ──> Inbox ──> call ──> gRPC ──> client

A call reads the streams of all its sequences through one `Inbox`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from airside.controller.gateway.request_metrics import RequestMetrics, TokenTimes
from airside.proto.abort_cause import AbortCause
from airside.proto.messages import Accepted, FinishedRow, ImageEncoded, ImageReady, Message, OutputBatch, Rejected

TOKENS_MAX = 4096
"""Tokens of one sequence that may wait for a client which has stopped reading."""


@dataclass(slots=True)
class Tokens:
    """Consecutive new tokens of a sequence."""

    ids: list[int] = field(default_factory=list)
    logprobs: bytearray = field(default_factory=bytearray)  # records, one per token, where they were asked for
    step_tokens: int = 0  # tokens computed for all sequences in the step that made the last of these


@dataclass(slots=True)
class PromptRecords:
    """Log-probability records of consecutive tokens of the prompt."""

    records: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True, slots=True)
class Lost:
    """The controller that knew this sequence is gone."""

    detail: str


News = Accepted | Rejected | ImageReady | ImageEncoded | Tokens | PromptRecords | FinishedRow | Lost


_END = (Rejected, FinishedRow, Lost)


class Stream:
    """News of one sequence, in order, up to its one end: what comes after that is dropped.

    Args:
        arrived: set whenever there is news.
        arrival: unix time of the call.
    """

    def __init__(self, arrived: asyncio.Event, arrival: float) -> None:
        self.overflowed = False
        self.times = TokenTimes(arrival)
        self._has_end = False  # the end is among the news, or was taken
        self._news: list[News] = []
        self._arrived = arrived

    @property
    def has_news(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._news)

    def put(self, news: News) -> None:
        """Appends news other than tokens: about two per image, and two more, in a sequence's life."""
        if self._has_end:
            return
        if self.overflowed and isinstance(news, FinishedRow):
            # Tokens are missing, also when the engine came to an end of its own before it heard of that.
            news = dataclasses.replace(news, reason="abort", detail=_too_slow())
        self._has_end = isinstance(news, _END)
        self._news.append(news)
        self._arrived.set()

    def put_tokens(self, ids: list[int], logprobs: bytes = b"", step_tokens: int = 0) -> bool:
        """Appends tokens. False, once: the reader is too far behind and the stream takes no more of them."""
        if self.overflowed or self._has_end or not ids:
            return True
        last = self._news[-1] if self._news else None
        waiting = last if isinstance(last, Tokens) else Tokens()
        if len(waiting.ids) + len(ids) > TOKENS_MAX:
            self.overflowed = True
            return False
        waiting.ids.extend(ids)
        waiting.logprobs.extend(logprobs)
        waiting.step_tokens = step_tokens
        if waiting is not last:
            self.put(waiting)
        return True

    def put_prompt_records(self, records: bytes) -> None:
        """Appends log-probabilities of the prompt."""
        last = self._news[-1] if self._news else None
        if isinstance(last, PromptRecords):
            last.records.extend(records)
        else:
            self.put(PromptRecords(bytearray(records)))

    def take(self) -> list[News]:
        """All the news there is."""
        news, self._news = self._news, []
        return news

    def take_first(self) -> News:
        """The oldest news; there must be some."""
        return self._news.pop(0)


class Inbox:
    """The streams of one call, in the order of its sequences. One reader."""

    def __init__(self, streams: Sequence[Stream], arrived: asyncio.Event) -> None:
        self._streams = streams
        self._arrived = arrived

    async def take_answers(self) -> list[News]:
        """Waits for the first news of every sequence: whether it was accepted."""
        await self._wait(lambda: all(stream.has_news for stream in self._streams))
        return [stream.take_first() for stream in self._streams]

    async def take(self) -> list[tuple[int, News]]:
        """Waits for news and takes all there is, each with its sequence's place."""
        await self._wait(lambda: any(stream.has_news for stream in self._streams))
        return [(index, news) for index, stream in enumerate(self._streams) for news in stream.take()]

    async def _wait(self, is_there: Callable[[], bool]) -> None:
        while not is_there():
            self._arrived.clear()
            await self._arrived.wait()


class Streams:
    """All live sequences of this gateway.

    Args:
        abort: told the sequence and the cause when a stream overflows.
        metrics: told when tokens come, however late they are read.
    """

    def __init__(self, abort: Callable[[int, str], None], metrics: RequestMetrics) -> None:
        self._abort = abort
        self._metrics = metrics
        self._streams: dict[int, Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, seq_ids: Sequence[int], arrival: float) -> Inbox:
        """The streams of a new call's sequences; must be closed. `arrival`: unix time of the call."""
        assert self._streams.keys().isdisjoint(seq_ids)
        arrived = asyncio.Event()
        streams = {seq_id: Stream(arrived, arrival) for seq_id in seq_ids}
        self._streams.update(streams)
        return Inbox(list(streams.values()), arrived)

    def close(self, seq_ids: Sequence[int]) -> None:
        """Later news of these sequences will be dropped: nobody waits for it."""
        for seq_id in seq_ids:
            del self._streams[seq_id]

    def lose_all(self, detail: str) -> None:
        """Ends every stream: the controller that knew these sequences is gone."""
        for stream in self._streams.values():
            stream.put(Lost(detail))

    def dispatch(self, message: Message) -> bool:
        """Hands a message of the controller to the streams it is about. False: it is about none."""
        match message:
            case OutputBatch():
                self._dispatch_batch(message)
            case Accepted() | Rejected() | ImageReady() | ImageEncoded():
                self._put(message.seq_id, message)
            case _:
                return False
        return True

    def _put(self, seq_id: int, news: News) -> None:
        stream = self._streams.get(seq_id)
        if stream is not None:
            stream.put(news)

    def _dispatch_batch(self, batch: OutputBatch) -> None:
        for seq_id, records in batch.prompt_rows():
            stream = self._streams.get(seq_id)
            if stream is not None:
                stream.put_prompt_records(records)
        now = time.time()
        for (seq_id, token_ids), records in zip(batch.rows(), batch.records(), strict=True):
            stream = self._streams.get(seq_id)
            if stream is None:
                continue
            if token_ids:
                self._metrics.tokens_came(stream.times, len(token_ids), now)
            if not stream.put_tokens(token_ids, records, batch.step_tokens):
                self._abort(seq_id, _too_slow())
        for row in batch.finished:
            if row.reason == "abort" and AbortCause.of(row.detail) is AbortCause.DEADLINE:
                self._metrics.deadline_expired(row.stage)  # also where gRPC has ended the call, and nobody reads it
            self._put(row.seq_id, row)


def _too_slow() -> str:
    return f"{AbortCause.CLIENT_SLOW}: {TOKENS_MAX} tokens wait for it"
