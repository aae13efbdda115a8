"""From the news about a call's sequences to the events of the call."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from airside.controller.gateway.continuation import Continuation
from airside.controller.gateway.errors import RequestError
from airside.controller.gateway.finish import lost_error, rejection_error
from airside.controller.gateway.image_times import stages_message
from airside.controller.gateway.request_metrics import RequestMetrics
from airside.controller.gateway.streams import Inbox, Lost, News, PromptRecords, Tokens
from airside.proto import airside_pb2 as pb
from airside.proto.messages import Accepted, FinishedRow, ImageEncoded, ImageReady, Rejected

Write = Callable[[pb.GenerateEvent], Awaitable[None]]


class Relay:
    """Writes one `accepted`, an `image_ready` per image, `delta`s, and one `finished` per continuation.

    Args:
        accepted: the event's values, but for the place in the queue, which is the controller's to say.
        continuations: one per sequence of the call.
        write: sends an event to the client; waits while the client does not read.
        metrics: told of images and ends.
        arrival: unix time of the call.
    """

    def __init__(
        self,
        accepted: pb.Accepted,
        continuations: Sequence[Continuation],
        write: Write,
        metrics: RequestMetrics,
        arrival: float,
    ) -> None:
        self._accepted = accepted
        self._continuations = continuations
        self._write = write
        self._metrics = metrics
        self._arrival = arrival
        self._was_accepted = False
        self._unfinished = set(range(len(continuations)))
        self._error: RequestError | None = None  # of the first end that has one
        self.unended = set(self._unfinished)
        """The continuations of which the controller may still have the sequence."""

    def abandon(self) -> None:
        """The call is over, also for those that have no end yet."""
        if self._was_accepted:
            for _ in self._unfinished:
                self._metrics.finished("abort", None, self._arrival, time.time())

    async def run(self, inbox: Inbox) -> None:
        """Relays until the last end.

        Raises:
            RequestError: a sequence was rejected, or the first end that has a status.
        """
        await self._accept(await inbox.take_answers())
        while self._unfinished:
            for index, news in await inbox.take():
                await self._pass_on(index, news)
        if self._error is not None:
            raise self._error

    async def _accept(self, answers: Sequence[News]) -> None:
        """All sequences were accepted, or the call fails."""
        rejected = {index: news for index, news in enumerate(answers) if isinstance(news, Rejected)}
        self.unended -= rejected.keys()
        for news in rejected.values():
            raise rejection_error(news)
        for answer in answers:
            if isinstance(answer, Lost):
                raise lost_error(answer.detail)
        first = answers[0]
        assert isinstance(first, Accepted)
        self._was_accepted = True
        self._accepted.queue_position = first.queue_position
        await self._write(pb.GenerateEvent(accepted=self._accepted))

    async def _pass_on(self, index: int, news: News) -> None:
        continuation = self._continuations[index]
        match news:
            case Tokens():
                await self._write_all(continuation.tokens(news))
            case PromptRecords():
                await self._write_all(continuation.prompt_records(news.records))
            case ImageReady():
                self._metrics.image_ready(news, self._arrival, time.time())
                if index == 0:
                    self._metrics.image_sized(news.pixels)
                    await self._write(_image_ready(news))
                await self._write_all(continuation.image_ready(news))
            case ImageEncoded():
                self._metrics.image_encoded(news)
                continuation.image_encoded(news)
            case FinishedRow():
                self.unended.discard(index)
                await self._finish(index, news, *continuation.finish(news))
            case Lost():
                # The controller may still have the sequence, so it counts as not ended: it is to be aborted.
                await self._finish(index, None, *continuation.lose(news.detail))
            case Accepted() | Rejected():
                raise AssertionError(f"{news} came twice")

    async def _finish(
        self, index: int, row: FinishedRow | None, events: Sequence[pb.GenerateEvent], error: RequestError | None
    ) -> None:
        """`row`: the engine's word, if there is any."""
        self._unfinished.discard(index)
        self._metrics.finished(events[-1].finished.reason, row, self._arrival, time.time())
        self._error = self._error or error
        await self._write_all(events)

    async def _write_all(self, events: Iterable[pb.GenerateEvent]) -> None:
        for event in events:
            await self._write(event)


def _image_ready(news: ImageReady) -> pb.GenerateEvent:
    event = pb.ImageReady(index=news.image_index, tokens=news.num_tokens, process_s=news.process_s, cached=news.cached)
    if news.stages is not None:
        event.stages.CopyFrom(stages_message(news.stages))
    return pb.GenerateEvent(image_ready=event)
