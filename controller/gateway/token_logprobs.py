"""Log-probability records as clients see them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from airside.controller.gateway.prompt import Prompt
from airside.proto import airside_pb2 as pb
from airside.proto.logprob_record import LogprobRecord, read_records, record_bytes

TokenBytes = Callable[[int], bytes]
"""The bytes that a token stands for."""


def token_logprobs(
    token_ids: Sequence[int], records: bytes | bytearray, token_bytes: TokenBytes
) -> list[pb.TokenLogprob]:
    """The public messages of tokens that have a record each. Raises ValueError when the records do not fit."""
    if not token_ids:
        return []
    read = read_records(memoryview(records), len(token_ids))
    return [_token_logprob(token_id, record, token_bytes) for token_id, record in zip(token_ids, read, strict=True)]


def _token_logprob(token_id: int, record: LogprobRecord, token_bytes: TokenBytes) -> pb.TokenLogprob:
    """What the record has no value for is left out."""
    top = [
        pb.TopLogprob(token_id=other, text=token_bytes(other), logprob=logprob)
        for other, logprob in zip(record.top_ids, record.top_logprobs, strict=True)
    ]
    return pb.TokenLogprob(
        token_id=token_id,
        text=token_bytes(token_id),
        logprob=record.logprob,
        sum_smaller_probs=record.sum_smaller,
        nextn_logprob=None if math.isnan(record.nextn_logprob) else record.nextn_logprob,
        draft_confidence=None if math.isnan(record.confidence) else record.confidence,
        top=top,
    )


class PromptLogprobs:
    """Puts names to the records of a prompt, which come in order and without any.

    The first token of the prompt has no record. A picture has as many as it takes tokens; which these are is known to
    the engine alone, so all of them bear the id of the mark. Records that come before the picture's number of tokens
    is known wait for it.

    Args:
        prompt: with one mark for each picture.
        num_alternatives: in each record; negative: there are none.
        token_bytes: of the text model.
    """

    def __init__(self, prompt: Prompt, num_alternatives: int, token_bytes: TokenBytes) -> None:
        self._record_bytes = record_bytes(max(0, num_alternatives))
        self._token_bytes = token_bytes
        self._token_ids = prompt.token_ids
        self._image_at = {position: index for index, position in enumerate(prompt.image_positions)}
        self._image_tokens: dict[int, int] = {}
        self._waiting = bytearray()  # records
        # The next record belongs to the token at `_place`; of a picture there, `_within` tokens have had theirs.
        self._place = 0
        self._within = 0
        self._is_past_first = False

    def push(self, records: bytes | bytearray) -> None:
        """Takes the next records."""
        self._waiting += records

    def size_image(self, image_index: int, num_tokens: int) -> None:
        """Takes the number of tokens of a picture."""
        self._image_tokens[image_index] = num_tokens

    def take(self, records_max: int) -> list[pb.TokenLogprob]:
        """The next ones that can be named, at most so many. What comes after the end of the prompt is dropped."""
        self._is_past_first = self._is_past_first or self._next_id() is not None
        ids: list[int] = []
        while len(ids) < min(records_max, len(self._waiting) // self._record_bytes):
            token_id = self._next_id()
            if token_id is None:
                break
            ids.append(token_id)
        size = len(ids) * self._record_bytes
        records = self._waiting[:size]
        del self._waiting[: len(self._waiting) if self._place == len(self._token_ids) else size]
        return token_logprobs(ids, records, self._token_bytes)

    def _next_id(self) -> int | None:
        """Takes the next token of the prompt; None: it is not known yet, or there are no more."""
        while self._place < len(self._token_ids):
            size = self._size_at(self._place)
            if size is None:
                return None
            if self._within < size:
                self._within += 1
                return self._token_ids[self._place]
            self._place, self._within = self._place + 1, 0
        return None

    def _size_at(self, place: int) -> int | None:
        image_index = self._image_at.get(place)
        return 1 if image_index is None else self._image_tokens.get(image_index)
