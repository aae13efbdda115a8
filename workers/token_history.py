"""The tokens of a sequence, and how often each came: what penalties look at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


class TokenHistory:
    """Prompt and output of one sequence. Distinct ids are kept in order of their first appearance.

    Args:
        token_ids: the prompt, and the output as far as it is known.
    """

    def __init__(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        assert len(token_ids) >= num_prompt_tokens
        self._num_prompt_tokens = num_prompt_tokens
        self._tokens: list[int] = []
        self._places: dict[int, int] = {}  # id -> its index in the arrays below
        self._ids = np.empty(64, np.int64)
        self._in_output = np.empty(64, np.int32)
        self._first_at: list[int] = []  # where in the sequence each distinct id came first
        self.extend(token_ids)

    def __len__(self) -> int:
        return len(self._tokens)

    def seen(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The distinct ids, and how often each is in the output. Copies."""
        count = len(self._places)
        return self._ids[:count].copy(), self._in_output[:count].copy()

    def extend(self, token_ids: Iterable[int]) -> None:
        """Appends tokens."""
        for token_id in token_ids:
            place = self._places.get(token_id)
            if place is None:
                place = self._add_distinct(token_id)
            self._in_output[place] += len(self._tokens) >= self._num_prompt_tokens
            self._tokens.append(token_id)

    def truncate_output(self, num_tokens: int) -> None:
        """Forgets all but the first `num_tokens` of the output. Raises AssertionError when there are not as many."""
        length = self._num_prompt_tokens + num_tokens
        assert length <= len(self._tokens), f"{num_tokens} output tokens are asked for, too few are known"
        while len(self._tokens) > length:
            place = self._places[self._tokens.pop()]
            self._in_output[place] -= 1
            if self._first_at[place] == len(self._tokens):  # then no other id came first later: it is the last place
                self._first_at.pop()
                del self._places[int(self._ids[place])]

    def _add_distinct(self, token_id: int) -> int:
        place = len(self._places)
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
            self._in_output = np.concatenate((self._in_output, np.empty_like(self._in_output)))
        self._ids[place] = token_id
        self._in_output[place] = 0
        self._first_at.append(len(self._tokens))
        self._places[token_id] = place
        return place
