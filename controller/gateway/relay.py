"""From the news about one sequence to the events of one call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from airside.controller.gateway.detokenizer import Detokenizer
from airside.controller.gateway.finish import finish_error, finished_event, lost_error, lost_row, rejection_error
from airside.controller.gateway.streams import Lost, News, Stream, Tokens
from airside.proto import airside_pb2 as pb
from airside.proto.messages import Accepted, FinishedRow, ImageReady, Rejected

Write = Callable[[pb.GenerateEvent], Awaitable[None]]


class Relay:
    """Writes one `accepted`, an `image_ready` per image, `delta`s, and one `finished`.

    Args:
        accepted: the event's values, but for the place in the queue, which is the controller's to say.
        detokenizer: a fresh one.
        write: sends an event to the client; waits while the client does not read.
    """

    def __init__(self, accepted: pb.Accepted, detokenizer: Detokenizer, write: Write) -> None:
        self._accepted = accepted
        self._detokenizer = detokenizer
        self._write = write
        self._was_accepted = False
        self._num_tokens = 0
        self.ended = False
        """Whether the controller has nothing more to say about the sequence."""

    async def run(self, stream: Stream) -> None:
        """Relays until the end.

        Raises:
            RequestError: the sequence was rejected, or its end is one that has a status.
        """
        while not self.ended:
            for news in await stream.take():
                await self._pass_on(news)

    async def _pass_on(self, news: News) -> None:
        match news:
            case Tokens():
                self._num_tokens += len(news.ids)
                await self._write_delta(news.ids, self._detokenizer.push(news.ids))
            case Accepted():
                self._was_accepted = True
                self._accepted.queue_position = news.queue_position
                await self._write(pb.GenerateEvent(accepted=self._accepted))
            case ImageReady():
                event = pb.ImageReady(index=news.image_index, tokens=news.num_tokens, process_s=news.process_s)
                await self._write(pb.GenerateEvent(image_ready=event))
            case FinishedRow():
                await self._finish(news)
            case Rejected():
                self.ended = True
                raise rejection_error(news)
            case Lost():
                await self._lose(news.detail)

    async def _finish(self, row: FinishedRow) -> None:
        self.ended = True
        await self._write_rest(row)
        error = finish_error(row)
        if error is not None:
            raise error

    async def _lose(self, detail: str) -> None:
        """The controller may still have the sequence, so it counts as not ended: it is to be aborted."""
        if self._was_accepted:
            await self._write_rest(lost_row(detail, self._accepted.prompt_tokens, self._num_tokens))
        raise lost_error(detail)

    async def _write_rest(self, row: FinishedRow) -> None:
        text = self._detokenizer.flush()
        if text:
            await self._write_delta([], text)
        await self._write(finished_event(row))

    async def _write_delta(self, token_ids: list[int], text: str) -> None:
        await self._write(pb.GenerateEvent(delta=pb.Delta(token_ids=token_ids, text=text)))
