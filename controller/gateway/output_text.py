"""The text of one output: from token ids to characters, up to the stop that ends it."""

from __future__ import annotations

from collections.abc import Sequence

from airside.controller.gateway.detokenizer import Detokenizer
from airside.controller.gateway.request_checks import StopValues
from airside.controller.gateway.stop_matcher import StopMatcher


class OutputText:
    """Token ids in, text out; a stop string ends both.

    A stop string that is complete before `stop.min_tokens` tokens are there is ordinary text. Unless the text is to
    include its stop, a stop token has none: the engine ends at the first one that comes after `min_tokens` others.

    Args:
        detokenizer: a fresh one.
        stop: when the text ends, and whether that shows in it.
    """

    def __init__(self, detokenizer: Detokenizer, stop: StopValues) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop.strings, stop.include_stop)
        self._cut_ids = frozenset(() if stop.include_stop else stop.token_ids)
        self._min_tokens = stop.min_tokens
        self._has_strings = bool(stop.strings)
        self.num_tokens = 0
        """Tokens of the output so far; after a stop string, up to and including the one that completed it."""

    @property
    def stop_match(self) -> str:
        """The stop string that ended the text; empty: none did so far."""
        return self._matcher.matched

    def push(self, token_ids: Sequence[int]) -> tuple[int, str]:
        """How many of these tokens belong to the output, and the text that can be given out now."""
        if not self._has_strings and self._cut_ids.isdisjoint(token_ids):
            self.num_tokens += len(token_ids)
            return len(token_ids), self._detokenizer.push(token_ids)
        num_before, pieces = self.num_tokens, []
        for token_id in token_ids:
            if self.stop_match:
                break
            self.num_tokens += 1
            pieces.append(self._push_one(token_id))
        return self.num_tokens - num_before, "".join(pieces)

    def finish(self) -> str:
        """The rest of the text, once no more tokens come. It may turn out to have a stop string even now."""
        return self._matcher.push(self._detokenizer.flush(), self._counts) + self._matcher.flush()

    def _push_one(self, token_id: int) -> str:
        if token_id in self._cut_ids and self.num_tokens > self._min_tokens:
            return ""
        return self._matcher.push(self._detokenizer.push((token_id,)), self._counts)

    @property
    def _counts(self) -> bool:
        """Whether a stop string that is complete now ends the text."""
        return self.num_tokens >= self._min_tokens
