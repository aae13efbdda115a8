from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airside.controller.gateway.detokenizer import Vocabulary
from airside.controller.gateway.output_text import OutputText
from airside.controller.gateway.request_checks import StopValues
from tests.gateway.test_stop_matcher import naive_match
from tests.gateway.tiny_checkpoint import END_ID, SPECIAL, byte_level_tokenizer

SPELLER = byte_level_tokenizer(vocab_size=256 + len(SPECIAL))  # one token per byte
MERGED = byte_level_tokenizer()
SILENT = range(len(SPECIAL))
TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "👩‍👩‍👧 and 🇫🇷🇩🇪, 東京は大きい",
    "हिन्दी में,    four spaces",
    "aaabaaabaaa\n\n\taab",
]


def stop_values(
    *strings: str, min_tokens: int = 0, include_stop: bool = False, token_ids: tuple[int, ...] = ()
) -> StopValues:
    return StopValues(None, min_tokens, list(token_ids), list(strings), include_stop)


def read(ids: list[int], stop: StopValues, rng: random.Random | None = None) -> tuple[str, int, str]:
    """The text, the number of tokens, and the stop string, of ids that come in batches."""
    output = OutputText(Vocabulary(MERGED, SILENT).detokenizer(), stop)
    text, begin = "", 0
    while begin < len(ids):
        end = begin + (rng or random).randint(1, 4)
        text += output.push(ids[begin:end])[1]
        begin = end
    return text + output.finish(), output.num_tokens, output.stop_match


def random_ids(text: str, rng: random.Random) -> list[int]:
    """Tokens of the text, cut anywhere: some merged, some single bytes."""
    ids: list[int] = []
    begin = 0
    while begin < len(text):
        end = begin + rng.randint(1, 6)
        tokenizer = rng.choice([SPELLER, MERGED])
        tokens = tokenizer.encode(text[begin:end], add_special_tokens=False).tokens
        ids += [MERGED.token_to_id(token) for token in tokens]
        begin = end
    return ids


def chars_by_token(ids: list[int]) -> list[int]:
    """How many characters are there after each token."""
    detokenizer = Vocabulary(MERGED, SILENT).detokenizer()
    counts, total = [], 0
    for token_id in ids:
        total += len(detokenizer.push([token_id]))
        counts.append(total)
    return counts


@settings(max_examples=300, deadline=None)
@given(
    text=st.sampled_from(TEXTS),
    seed=st.integers(0, 10_000),
    cuts=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), max_size=3),
    never=st.booleans(),
    min_tokens=st.integers(0, 8),
    include_stop=st.booleans(),
)
def test_stops_cut_from_the_text_itself(
    text: str, seed: int, cuts: list[tuple[int, int]], never: bool, min_tokens: int, include_stop: bool
) -> None:
    rng = random.Random(seed)
    stops = [stop for begin, size in cuts if (stop := text[begin : begin + size])] + ["never there"] * never
    ids = random_ids(text, rng)
    ends = chars_by_token(ids)
    token_of_char = [next(i for i, end in enumerate(ends, 1) if end > char) for char in range(len(text))]
    found = naive_match(text, stops, [token >= min_tokens for token in token_of_char])
    result = read(ids, stop_values(*stops, min_tokens=min_tokens, include_stop=include_stop), rng)
    if found is None:
        assert result == (text, len(ids), "")
    else:
        end, match = found
        assert result == (text[: end if include_stop else end - len(match)], token_of_char[end - 1], match)


def test_a_stop_string_is_text_before_min_tokens() -> None:
    ids = [MERGED.token_to_id(char) for char in "abcabcabc"]
    assert read(ids, stop_values("bc", min_tokens=4)) == ("abca", 6, "bc")
    assert read(ids, stop_values("bc", min_tokens=10)) == ("abcabcabc", 9, "")
    # It may have begun before.
    assert read(ids, stop_values("bc", min_tokens=3)) == ("a", 3, "bc")


@pytest.mark.parametrize(("include_stop", "text"), [(False, "ab"), (True, "abc")])
def test_a_stop_tokens_text_shows_when_it_is_to(include_stop: bool, text: str) -> None:
    a, b, c = (MERGED.token_to_id(char) for char in "abc")
    stop = stop_values(include_stop=include_stop, token_ids=(c, END_ID))
    assert read([a, b, c], stop) == (text, 3, "")
    assert read([a, b, END_ID], stop) == ("ab", 3, "")  # it has none to show


def test_a_stop_token_before_min_tokens_is_text() -> None:
    a, c = (MERGED.token_to_id(char) for char in "ac")
    for min_tokens in (2, 3):
        assert read([a, c, a, c], stop_values(token_ids=(c,), min_tokens=min_tokens)) == ("aca", 4, "")


def test_held_text_comes_at_the_end() -> None:
    output = OutputText(Vocabulary(MERGED, SILENT).detokenizer(), stop_values("bcd"))
    texts = [output.push([MERGED.token_to_id(char)]) for char in "abc"]
    assert texts == [(1, "a"), (1, ""), (1, "")]
    assert output.finish() == "bc"


def test_a_stop_in_the_last_half_character() -> None:
    ids = [MERGED.token_to_id(token) for token in SPELLER.encode("a🙂").tokens[:-1]]
    assert read(ids, stop_values("\ufffd")) == ("a", 4, "\ufffd")
    assert read(ids, stop_values("🙂")) == ("a\ufffd", 4, "")


def test_tokens_behind_the_match_are_dropped() -> None:
    output = OutputText(Vocabulary(MERGED, SILENT).detokenizer(), stop_values("b"))
    ids = [MERGED.token_to_id(char) for char in "abab"]
    assert output.push(ids) == (2, "a")
    assert output.push(ids) == (0, "")
    assert (output.num_tokens, output.finish()) == (2, "")


@pytest.mark.parametrize(("min_tokens", "match"), [(1, "\ufffd"), (2, "")])
def test_a_character_cut_off_by_the_end_is_a_stop_only_after_min_tokens(min_tokens: int, match: str) -> None:
    first_half = MERGED.token_to_id(SPELLER.encode("é", add_special_tokens=False).tokens[0])
    text, num_tokens, stop_match = read([first_half], stop_values("\ufffd", min_tokens=min_tokens))
    assert (text, num_tokens, stop_match) == ("" if match else "\ufffd", 1, match)
