"""Token ids to text, as they come: always whole characters, and in sum exactly the text of all ids.

Byte-level vocabularies (GPT-2's kind) are tables from id to bytes, so an incremental UTF-8 decoder is all it takes:
what is held back is at most the three bytes of an unfinished character. Others (sentencepiece's kind) are decoded with
a few tokens of context, since what a token reads as can depend on its neighbours: a first token loses its space.
Their byte tokens `<0xE4>` go through the incremental decoder as well.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

_CONTEXT_TOKENS = 4  # one would do for all decoders seen so far, as long as it reads as something

_SPELLED_MAX = 16_384  # tokens whose bytes are remembered where finding them takes the tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer(Protocol):
    """The text of one sequence."""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; may be empty."""

    def flush(self) -> str:
        """What is left at the end: nothing, or U+FFFD for a character that was never finished."""


class Vocabulary:
    """Makes detokenizers for one tokenizer.

    Args:
        tokenizer: of the checkpoint.
        silent_ids: tokens without text of their own: special and end tokens.
    """

    def __init__(self, tokenizer: Tokenizer, silent_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._silent = frozenset(silent_ids)
        kinds = _decoder_kinds(tokenizer)
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self._bytes: list[bytes] | None = None
        self._byte_tokens: dict[int, bytes] = {}
        self._spelled = functools.lru_cache(_SPELLED_MAX)(self._spell)
        if kinds and set(kinds) <= {"ByteLevel", "Fuse"}:
            self._bytes = _byte_table(vocabulary)
        elif "ByteFallback" in kinds:
            found = ((token_id, _BYTE_TOKEN.fullmatch(token)) for token, token_id in vocabulary.items())
            self._byte_tokens = {token_id: bytes.fromhex(match[1]) for token_id, match in found if match}

    def detokenizer(self) -> Detokenizer:
        """A fresh one, for one sequence."""
        if self._bytes is not None:
            return _ByteLevel(self._bytes, self._silent)
        return _Windowed(self._tokenizer, self._byte_tokens, self._silent)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for inside a text; of a special token, its name. Empty for an id that has none."""
        if self._bytes is not None:
            return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""
        return self._byte_tokens.get(token_id) or self._spelled(token_id)

    def _spell(self, token_id: int) -> bytes:
        # After another token, since the first one of a text may lose its space.
        after: str = self._tokenizer.decode([self._anchor, token_id], skip_special_tokens=False)
        return after.removeprefix(self._anchor_text).encode()

    @functools.cached_property
    def _anchor(self) -> int:
        """A token that reads as something, whatever comes after it."""
        return next(
            (i for i in range(self._tokenizer.get_vocab_size()) if i not in self._byte_tokens and self._reads(i)), 0
        )

    @functools.cached_property
    def _anchor_text(self) -> str:
        text: str = self._tokenizer.decode([self._anchor], skip_special_tokens=False)
        return text

    def _reads(self, token_id: int) -> bool:
        return token_id not in self._silent and bool(self._tokenizer.decode([token_id], skip_special_tokens=False))


class _ByteLevel:
    def __init__(self, table: Sequence[bytes], silent: frozenset[int]) -> None:
        self._table = table
        self._silent = silent
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        # An id past the table is a row of the embedding that the tokenizer has no name for: it has no text.
        table, size, silent = self._table, len(self._table), self._silent
        return self._utf8.decode(b"".join([table[i] for i in token_ids if 0 <= i < size and i not in silent]))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _Windowed:
    def __init__(self, tokenizer: Tokenizer, byte_tokens: dict[int, bytes], silent: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._byte_tokens = byte_tokens
        self._silent = silent
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._context: list[int] = []

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join([self._push_one(i) for i in token_ids if i not in self._silent])

    def flush(self) -> str:
        text: str = self._utf8.decode(b"", final=True)
        return text

    def _push_one(self, token_id: int) -> str:
        byte = self._byte_tokens.get(token_id)
        # A space at the very beginning may be lost, also one that is spelled as a byte.
        if byte is not None and not (byte == b" " and not self._context):
            self._remember(token_id)
            return self._utf8.decode(byte)
        before = self._decode(self._context)
        after = self._decode([*self._context, token_id])
        self._remember(token_id)
        return self.flush() + after[len(before) :]

    def _remember(self, token_id: int) -> None:
        self._context = [*self._context, token_id][-_CONTEXT_TOKENS:]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False) if token_ids else ""


def _decoder_kinds(tokenizer: Tokenizer) -> list[str]:
    """Names of the tokenizer's decoders, in order; empty when it has none."""
    if tokenizer.decoder is None:
        return []
    state: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())  # Any: the library's JSON
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    return [part["type"] for part in parts]


def _byte_table(vocabulary: dict[str, int]) -> list[bytes]:
    """Bytes by id. A token that is not spelled in the byte alphabet (an added one) stands for its own UTF-8."""
    byte_of = {char: byte for byte, char in _byte_alphabet().items()}
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        spelled = [byte_of.get(char, -1) for char in token]
        table[token_id] = token.encode() if -1 in spelled else bytes(spelled)
    return table


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte: itself where Latin-1 prints it, else the next free one from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
