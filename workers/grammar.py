"""One sequence's compiled grammar, kept in step with what the sequence has made."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from airside.proto.grammar_limits import PARSER_LIMITS

CANNOT_GO_ON = "the grammar cannot go on"
"""How each detail of a grammar begins that was built and failed later: it is what was asked for, and not the server."""

_LIMITS = LLParserLimits(**PARSER_LIMITS)  # type: ignore[arg-type]  # one type per keyword


class GrammarError(Exception):
    """The grammar cannot be built, or does not fit the output so far."""


class Grammar:
    """The matcher of one sequence.

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
        self._mask_bytes = (tokenizer.vocab_size + 31) // 32 * 4
        ends = [place for place, token in enumerate(output_ids) if token in self._end_ids]
        self._has_ended = bool(ends)  # by an end token, or since none could be sampled; neither is one of `_tokens`
        self._tokens = output_ids[: ends[0]] if ends else list(output_ids)
        self._matcher: LLMatcher | None = self._fresh_matcher()
        self._why_failed: str | None = None

    @property
    def why_failed(self) -> str | None:
        """Why the grammar cannot go on, for ever after; None: it can."""
        return self._why_failed

    def masks(self, position: int, drafts: Sequence[int]) -> NDArray[np.uint8]:
        """[1 + len(drafts), mask_bytes]; see `Grammars.masks`."""
        rows = np.full((1 + len(drafts), self._mask_bytes), 0xFF, np.uint8)
        if self._is_in_vain(position):
            return rows
        matcher = self._synced(position)
        if matcher is None or not self._fill(matcher, rows[0]):
            self._fail(matcher)
            rows[0] = 0
            return rows
        num_consumed = 0
        for draft, row, row_after in zip(drafts, rows[:-1], rows[1:], strict=True):
            if draft in self._end_ids or not _allows(row, draft):
                break
            num_consumed += 1
            if not (matcher.consume_token(draft) and self._fill(matcher, row_after)):
                row_after[:] = 0
                break
        if matcher.is_error() or (num_consumed and not matcher.rollback(num_consumed)):
            self._matcher = None  # an error stays, and the drafts that led there may not be accepted
        return rows

    def advance(self, position: int, tokens: Sequence[int]) -> None:
        """Takes in what was sampled from `position` on; see `Grammars.advance`."""
        if self._is_in_vain(position):
            return
        matcher = self._synced(position)
        for token in tokens:
            if token < 0 or token in self._end_ids:
                self._has_ended = True
                return
            if matcher is None or not matcher.consume_token(token):
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

    def _fresh_matcher(self) -> LLMatcher:
        """Raises GrammarError."""
        matcher = LLMatcher(self._tokenizer, self._serialized, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarError(_why(matcher))
        if self._tokens and not matcher.consume_tokens(self._tokens):
            raise GrammarError(f"{CANNOT_GO_ON} from the output so far: {_why(matcher)}")
        return matcher

    def _fill(self, matcher: LLMatcher, row: NDArray[np.uint8]) -> bool:
        """Writes what may come next. False: the grammar is stuck, and llguidance would have the text end there."""
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, self._mask_bytes)
        return not matcher.is_error()


def _allows(row: NDArray[np.uint8], token: int) -> bool:
    return 0 <= token < 8 * len(row) and bool(row[token // 8] >> (token % 8) & 1)


def _why(matcher: LLMatcher) -> str:
    """llguidance's message in one line."""
    if matcher.get_error().startswith("NoExtension"):
        return "it allows nothing that could come next"
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
