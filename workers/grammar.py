"""One sequence's compiled grammar, kept in step with what the sequence has made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from airside.proto.grammar_limits import PARSER_LIMITS, RENEW_TOKENS

CANNOT_GO_ON = "the grammar cannot go on"
"""How each detail of a grammar begins that was built and failed later: it is what was asked for, and not the server."""

Rows: TypeAlias = NDArray[np.uint8]
"""[n, mask_bytes]: bit i of byte b says whether token `8 * b + i` may come."""

_LIMITS = LLParserLimits(**PARSER_LIMITS)  # type: ignore[arg-type]  # one type per keyword


class GrammarError(Exception):
    """The grammar cannot be built, or does not fit the output so far."""


class Grammar:
    """The matcher of one sequence.

    No matcher is a copy of another's, however alike their grammars: copies of llguidance's share their lexer, with its
    limits and its errors, so that what one sequence is allowed would depend on another.

    Invariant between calls: unless it is to be made anew (None), the matcher has consumed exactly `_tokens`.

    Args:
        tokenizer: of the model; shared, it does not change.
        serialized: llguidance's form.
        output_ids: what the sequence has made already.

    Raises:
        GrammarError: the message says why, in one line.
    """

    def __init__(self, tokenizer: LLTokenizer, serialized: str, output_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._serialized = serialized
        self._end_ids = frozenset(tokenizer.eos_tokens)
        self.mask_bytes = (tokenizer.vocab_size + 31) // 32 * 4
        """Of a row."""
        ends = [place for place, token in enumerate(output_ids) if token in self._end_ids]
        self._has_ended = bool(ends)  # by an end token, or since none could be sampled; neither is one of `_tokens`
        self._tokens = output_ids[: ends[0]] if ends else list(output_ids)
        self._num_replayed = 0  # tokens that were there when the matcher was made; few states are needed for them
        self._matcher: LLMatcher | None = self._fresh_matcher()
        self._why_failed: str | None = None

    @property
    def why_failed(self) -> str | None:
        """Why the grammar cannot go on, for ever after; None: it can."""
        return self._why_failed

    def masks(self, position: int, drafts: Sequence[int], rows: Rows) -> Iterator[tuple[LLMatcher, int]]:
        """Fills `rows`, 1 + len(drafts) of them, all bits of which are set; see `Grammars.masks`.

        What takes long is left to the caller, who does it for many grammars at once: each matcher and index that is
        yielded is a row that it is to have filled when it asks for the next.
        """
        if self._is_in_vain(position):
            return
        matcher = self._synced(position)
        if matcher is not None:
            yield matcher, 0
            if (relieved := self._relieved(matcher)) is not matcher:
                matcher = relieved
                yield matcher, 0
        if matcher is None or matcher.is_error():
            self._fail(matcher)
            rows[0][:] = 0
            return
        num_consumed = 0
        for draft, row in zip(drafts, rows[:-1], strict=True):
            if draft in self._end_ids or not _allows(row, draft):
                break
            num_consumed += 1
            if matcher.consume_token(draft):
                yield matcher, num_consumed
            if (relieved := self._relieved(matcher, drafts[:num_consumed])) is not matcher:
                matcher = relieved
                yield matcher, num_consumed
            if matcher.is_error():
                rows[num_consumed][:] = 0
                break
        if matcher.is_error() or (num_consumed and not matcher.rollback(num_consumed)):
            self._matcher = None  # an error stays, and the drafts that led there may not be accepted

    def advance(self, position: int, tokens: Sequence[int]) -> None:
        """Takes in what was sampled from `position` on; see `Grammars.advance`."""
        if self._is_in_vain(position):
            return
        matcher = self._synced(position)
        for token in tokens:
            if token < 0 or token in self._end_ids:
                self._has_ended = True
                return
            if matcher is not None and not matcher.consume_token(token):
                matcher = self._relieved(matcher, [token])
            if matcher is None or matcher.is_error():
                self._fail(matcher)
                return
            self._tokens.append(token)

    def _fail(self, matcher: LLMatcher | None) -> None:
        """Remembers why there is no way on. None: that is known."""
        if matcher is not None and self._why_failed is None:
            self._why_failed = f"{CANNOT_GO_ON}: {_why(matcher)}"

    def _is_in_vain(self, position: int) -> bool:
        """Whether a step was planned for this position before it was known that the sequence ends ahead of it."""
        return self._has_ended and position > len(self._tokens)

    def _synced(self, position: int) -> LLMatcher | None:
        """The matcher with the first `position` tokens consumed; those after them turned out not to count.

        None: the grammar has failed.
        """
        if self._why_failed is not None:
            return None
        assert 0 <= position <= len(self._tokens), f"position {position} after {len(self._tokens)} tokens"
        num_void = len(self._tokens) - position
        del self._tokens[position:]
        self._has_ended = False
        if self._matcher is None or (num_void and not self._matcher.rollback(num_void)):
            try:
                self._matcher = self._fresh_matcher()
            except GrammarError as error:
                self._matcher, self._why_failed = None, str(error)
        return self._matcher

    def _relieved(self, matcher: LLMatcher, ahead: Sequence[int] = ()) -> LLMatcher:
        """The matcher, or a fresh one in its place if its lexer is full and took long enough to fill.

        `ahead`: what it is to have consumed after the tokens.
        """
        num_consumed = len(self._tokens) + len(ahead)
        if _is_full(matcher) and num_consumed - self._num_replayed >= RENEW_TOKENS:
            with contextlib.suppress(GrammarError):
                self._matcher = matcher = self._fresh_matcher(ahead)
        return matcher

    def _fresh_matcher(self, ahead: Sequence[int] = ()) -> LLMatcher:
        """Raises GrammarError."""
        matcher = LLMatcher(self._tokenizer, self._serialized, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarError(_why(matcher))
        consumed = [*self._tokens, *ahead]
        if consumed and not matcher.consume_tokens(consumed):
            raise GrammarError(f"{CANNOT_GO_ON} from the output so far: {_why(matcher)}")
        self._num_replayed = len(consumed)
        return matcher


def _allows(row: NDArray[np.uint8], token: int) -> bool:
    return 0 <= token < 8 * len(row) and bool(row[token // 8] >> (token % 8) & 1)


def _is_full(matcher: LLMatcher) -> bool:
    """Whether its lexer has as many states as are allowed."""
    return matcher.is_error() and "too many states" in matcher.get_error()


def _why(matcher: LLMatcher) -> str:
    """llguidance's message in one line."""
    if matcher.get_error().startswith("NoExtension"):
        return "it allows nothing that could come next"
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
