from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from airside.controller.gateway.detokenizer import Vocabulary
from tests.gateway.tiny_checkpoint import SPECIAL, byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
SIZE = TOKENIZER.get_vocab_size(with_added_tokens=True)
SILENT = range(len(SPECIAL))
VOCABULARY = Vocabulary(TOKENIZER, SILENT)
SPELLER = byte_level_tokenizer(vocab_size=256 + len(SPECIAL))  # too small for merges: one token per byte
SPELLING = Vocabulary(SPELLER, SILENT)
TEXTS = [
    "plain words",
    "déjà vu 東京 🙂🚀👩‍👩‍👧",
    "🏳️‍🌈\u0000\u200b end",
    "한국어 and \ufffd itself",
    "🇫🇷🇩🇪 flags",
    "हिन्दी में",
    "    four spaces",
]


def stream(vocabulary: Vocabulary, chunks: list[list[int]]) -> list[str]:
    """The text of each chunk, and of the flush."""
    detokenizer = vocabulary.detokenizer()
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.flush()]


def cut(ids: list[int], rng: random.Random) -> list[list[int]]:
    chunks, begin = [], 0
    while begin < len(ids):
        end = begin + rng.randint(1, 3)
        chunks.append(ids[begin:end])
        begin = end
    return chunks


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, SIZE - 1), max_size=40), seed=st.integers(0, 1000))
def test_chunks_join_to_the_text_of_all_ids(ids: list[int], seed: int) -> None:
    texts = stream(VOCABULARY, cut(ids, random.Random(seed)))
    assert "".join(texts) == TOKENIZER.decode(ids, skip_special_tokens=True)
    assert set(texts[-1]) <= {"\ufffd"}


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30))
def test_characters_are_never_split(text: str) -> None:
    ids = SPELLER.encode(text).ids
    texts = stream(SPELLING, [[i] for i in ids])
    assert "".join(texts) == text
    assert texts[-1] == ""
    assert "".join(texts).count("\ufffd") == text.count("\ufffd")


@pytest.mark.parametrize("text", TEXTS)
def test_a_character_comes_with_its_last_byte(text: str) -> None:
    ids = SPELLER.encode(text).ids
    assert len(ids) == len(text.encode())
    texts = stream(SPELLING, [[i] for i in ids])
    assert [chunk for chunk in texts if chunk] == list(text)


def test_an_unfinished_character_becomes_one_replacement_at_the_end() -> None:
    ids = SPELLER.encode("a🙂").ids[:-1]
    assert stream(SPELLING, [ids]) == ["a", "\ufffd"]


def test_special_tokens_between_bytes_change_nothing() -> None:
    first, *rest = SPELLER.encode("é").ids
    assert "".join(stream(SPELLING, [[first, *SILENT], rest])) == "é"


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_tokens_join_to_the_text(text: str) -> None:
    for tokenizer, vocabulary in ((SPELLER, SPELLING), (TOKENIZER, VOCABULARY)):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert b"".join(map(vocabulary.token_bytes, ids)) == text.encode()


def test_bytes_of_special_added_and_unnamed_tokens() -> None:
    named = [VOCABULARY.token_bytes(i) for i in (2, TOKENIZER.token_to_id("[tool]"), TOKENIZER.token_to_id("東 京"))]
    assert named == [SPECIAL[2].encode(), b"[tool]", "東 京".encode()]
    assert [VOCABULARY.token_bytes(i) for i in (SIZE, SIZE + 1000, -1)] == [b""] * 3


def test_special_tokens_and_unnamed_ids_have_no_text() -> None:
    assert stream(VOCABULARY, [[*SILENT, SIZE, SIZE + 1000]]) == ["", ""]


# --- a sentencepiece kind of vocabulary ---------------------------------------------------------------------------

BYTE_FALLBACK_TOKENS = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hello", "hello", "▁東", "京", "."]


def byte_fallback_tokenizer() -> Tokenizer:
    vocab = {token: i for i, token in enumerate(BYTE_FALLBACK_TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<s>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


FALLBACK = byte_fallback_tokenizer()
FALLBACK_VOCABULARY = Vocabulary(FALLBACK, [0])
_words = st.sampled_from(range(257, len(BYTE_FALLBACK_TOKENS))).map(lambda i: [i])
_characters = st.characters(codec="utf-8").map(lambda char: [1 + byte for byte in char.encode()])


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(st.one_of(_words, _characters, st.just([0])), max_size=20), seed=st.integers(0, 1000))
def test_byte_fallback_joins_to_the_text_of_all_ids(parts: list[list[int]], seed: int) -> None:
    ids = [i for part in parts for i in part]
    texts = stream(FALLBACK_VOCABULARY, cut(ids, random.Random(seed)))
    assert "".join(texts) == FALLBACK.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("ids", [[33], [33, 33], [257, 33], [33, 257], [0, 33, 259]])
def test_a_first_space_is_lost_however_it_is_spelled(ids: list[int]) -> None:
    expected = FALLBACK.decode(ids, skip_special_tokens=True)
    assert "".join(stream(FALLBACK_VOCABULARY, [[i] for i in ids])) == expected


def test_byte_fallback_holds_back_at_most_one_character() -> None:
    ids = [1 + byte for byte in "🙂".encode()[:-1]]
    assert stream(FALLBACK_VOCABULARY, [ids]) == ["", "\ufffd"]
    assert stream(FALLBACK_VOCABULARY, [ids, [259]]) == ["", "\ufffdhello", ""]


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("▁hello", b" hello"),
        ("hello", b"hello"),
        ("▁", b" "),
        ("京", "京".encode()),
        ("<0xF0>", b"\xf0"),
        ("<s>", b"<s>"),
    ],
)
def test_byte_fallback_bytes_keep_their_space(token: str, expected: bytes) -> None:
    assert FALLBACK_VOCABULARY.token_bytes(BYTE_FALLBACK_TOKENS.index(token)) == expected
