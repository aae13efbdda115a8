"""What penalties look at: which ids came, and how often in the output."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
from hypothesis import given

from airside.workers.token_history import TokenHistory

IDS = st.lists(st.integers(0, 5) | st.integers(0, 1000), max_size=90)


@given(IDS, IDS, st.lists(st.tuples(IDS, st.floats(0, 1)), max_size=6))
def test_it_counts_as_a_counter_does(
    prompt: list[int], output: list[int], changes: list[tuple[list[int], float]]
) -> None:
    """Extended, and cut back to a part of the output, again and again."""
    history = TokenHistory([*prompt, *output], len(prompt))
    for more, kept in [([], 1.0), *changes]:
        history.extend(more)
        output = [*output, *more]
        output = output[: round(kept * len(output))]
        history.truncate_output(len(output))
        ids, in_output = history.seen()
        made = Counter(output)
        assert ids.tolist() == list(dict.fromkeys([*prompt, *output]))
        assert in_output.tolist() == [made[token] for token in ids.tolist()]
        assert len(history) == len(prompt) + len(output)
