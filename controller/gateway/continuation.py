"""One sequence's news as the events of its index."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from airside.controller.gateway.errors import RequestError
from airside.controller.gateway.finish import (
    finish_error,
    finished_event,
    lost_error,
    lost_row,
    stop_detail,
    stopped_row,
)
from airside.controller.gateway.image_times import ImageTimes
from airside.controller.gateway.output_text import OutputText
from airside.controller.gateway.prompt import Prompt
from airside.controller.gateway.streams import Tokens
from airside.controller.gateway.terms import Terms
from airside.controller.gateway.text_model import TextModel
from airside.controller.gateway.token_logprobs import PromptLogprobs, token_logprobs
from airside.proto import airside_pb2 as pb
from airside.proto.messages import FinishedRow, ImageEncoded, ImageReady

RECORDS_MAX = 256
"""Tokens of one event. With 20 alternatives for each it stays far below the 4 MB that gRPC clients take by default, and
takes milliseconds to make: other streams are served between two."""

Stop = Callable[[int, str], None]
"""Told how many tokens the output has, and why, when a stop string ends it."""


class Continuation:
    """Makes the `delta`s and the one `finished` of a sequence.

    Args:
        index: of the continuation, as in its events.
        terms, prompt: what was asked for.
        model: the text side.
        stop: called once, when a stop string is complete. The end that then comes from the engine is a stop for the
            client in any case, and tokens that came after the match were never there.
    """

    def __init__(self, index: int, terms: Terms, prompt: Prompt, model: TextModel, stop: Stop) -> None:
        self._index = index
        self._num_prompt_tokens = len(prompt.token_ids)
        self._token_bytes = model.token_bytes
        self._text = OutputText(model.detokenizer(), terms.stop)
        self._prompt_logprobs = PromptLogprobs(prompt, terms.logprobs.prompt_logprobs, model.token_bytes)
        self._stop = stop
        self._images = ImageTimes()

    def tokens(self, news: Tokens) -> Iterator[pb.GenerateEvent]:
        """Events for new tokens; none for those behind a stop string."""
        record_size = len(news.logprobs) // len(news.ids)
        for begin in range(0, len(news.ids), RECORDS_MAX):
            ids = news.ids[begin : begin + RECORDS_MAX]
            if self._text.stop_match:
                return
            num_taken, text = self._text.push(ids)
            if self._text.stop_match:
                self._stop(self._text.num_tokens, stop_detail(self._text.stop_match))
            taken = ids[:num_taken]
            delta = pb.Delta(token_ids=taken, text=text, index=self._index, step_tokens=news.step_tokens)
            if record_size:
                records = news.logprobs[begin * record_size : (begin + num_taken) * record_size]
                delta.logprobs.extend(token_logprobs(taken, records, self._token_bytes))
            yield pb.GenerateEvent(delta=delta)

    def prompt_records(self, records: bytes | bytearray) -> Iterator[pb.GenerateEvent]:
        """Events for log-probabilities of the prompt."""
        self._prompt_logprobs.push(records)
        return self._prompt_events()

    def image_ready(self, news: ImageReady) -> Iterator[pb.GenerateEvent]:
        """Events for log-probabilities of the prompt that waited for the size of this image."""
        self._images.ready(news)
        self._prompt_logprobs.size_image(news.image_index, news.num_tokens)
        return self._prompt_events()

    def image_encoded(self, news: ImageEncoded) -> None:
        """The embeddings of an image are there; the end tells how long they took."""
        self._images.encoded(news)

    def finish(self, row: FinishedRow) -> tuple[list[pb.GenerateEvent], RequestError | None]:
        """The last events, and the status that this end has; None: OK."""
        events = []
        text = self._text.finish()
        if text:
            events.append(pb.GenerateEvent(delta=pb.Delta(text=text, index=self._index)))
        match = self._text.stop_match
        end = stopped_row(row, match, self._text.num_tokens) if match else row
        events.append(finished_event(end, self._index, match))
        self._images.fill(events[-1].finished)
        return events, finish_error(end)

    def lose(self, detail: str) -> tuple[list[pb.GenerateEvent], RequestError | None]:
        """The same, when the controller is gone: nobody else will say it."""
        events, error = self.finish(lost_row(detail, self._num_prompt_tokens, self._text.num_tokens))
        return events, lost_error(detail) if error is not None else None

    def _prompt_events(self) -> Iterator[pb.GenerateEvent]:
        while logprobs := self._prompt_logprobs.take(RECORDS_MAX):
            yield pb.GenerateEvent(delta=pb.Delta(prompt_logprobs=logprobs, index=self._index))
