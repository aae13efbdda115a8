from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airside.controller.gateway.stop_matcher import StopMatcher

LONG = "a stop string that is rather long: 40 ch."

ROWS: list[tuple[str, list[str], str, str]] = [
    # text, stops, the text before the match, the match
    ("one two three", ["two"], "one ", "two"),
    ("one two three", ["four"], "one two three", ""),
    ("abc", ["c"], "ab", "c"),
    ("abc", ["a"], "", "a"),
    (f"so: {LONG} and on", [LONG], "so: ", LONG),
    ("xabcdy", ["abcd", "bc"], "xa", "bc"),  # what ends first
    ("xabcy", ["bc", "abc"], "x", "abc"),  # of what ends together, what starts first
    ("xabc", ["ab", "abc"], "x", "ab"),  # one is a prefix of the other
    ("aaab", ["aab"], "a", "aab"),
    ("ababac", ["abac"], "ab", "abac"),
    ("was \u00e9t\u00e9, 東京!", ["東京"], "was \u00e9t\u00e9, ", "東京"),
    ("\U0001f469\u200d\U0001f680 done", ["\u200d"], "\U0001f469", "\u200d"),
    ("e\u0301", ["e"], "", "e"),
    ("", ["a"], "", ""),
    ("no stops", [], "no stops", ""),
]


def pieces(text: str, size: int) -> list[str]:
    return [text[begin : begin + size] for begin in range(0, len(text), size)]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(("text", "stops", "before", "match"), ROWS)
def test_the_first_match_ends_the_text(text: str, stops: list[str], before: str, match: str, size: int) -> None:
    for include_stop in (False, True):
        matcher = StopMatcher(stops, include_stop)
        given_out = "".join([matcher.push(piece) for piece in pieces(text, size)]) + matcher.flush()
        assert (given_out, matcher.matched) == (before + match if include_stop else before, match)
        if match:  # whatever follows
            assert matcher.push(text) + matcher.flush() == ""


def naive_match(text: str, stops: list[str], counts: list[bool]) -> tuple[int, str] | None:
    """Where the first match ends, and the match. `counts`: by character."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)] if counts[end - 1] else []
        if found:
            return end, max(found, key=len)
    return None


def naive_held(text: str, stops: list[str]) -> str:
    """The longest end of the text that may still become a stop."""
    beginnings = {stop[:size] for stop in stops for size in range(len(stop))}
    return next(text[begin:] for begin in range(len(text) + 1) if text[begin:] in beginnings | {""})


few_letters = st.text("ab", min_size=1, max_size=5)


@settings(max_examples=400, deadline=None)
@given(
    parts=st.lists(st.tuples(st.text("abc", max_size=4), st.booleans()), max_size=12),
    stops=st.lists(few_letters, max_size=4),
    include_stop=st.booleans(),
)
def test_equal_to_a_search_through_the_whole_text(
    parts: list[tuple[str, bool]], stops: list[str], include_stop: bool
) -> None:
    matcher = StopMatcher(stops, include_stop)
    text, given_out = "", ""
    counts: list[bool] = []
    for piece, piece_counts in parts:
        text += piece
        counts += [piece_counts] * len(piece)
        given_out += matcher.push(piece, piece_counts)
        found = naive_match(text, stops, counts)
        if found is None:
            assert matcher.matched == ""
            assert given_out + naive_held(text, stops) == text  # not a character less, and not one more
        else:
            end, match = found
            assert matcher.matched == match
            assert given_out == text[: end if include_stop else end - len(match)]
    if not matcher.matched:
        assert given_out + matcher.flush() == text
