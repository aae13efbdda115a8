"""Sequences that have computed all they may: they wait for their grammars or pictures without work for anyone."""

from __future__ import annotations

import pytest

from tests.engine.driver import Driver


@pytest.mark.parametrize("caching", [True, False])
def test_more_of_them_than_the_pool_holds_come_to_rest(caching: bool) -> None:
    """Three prompts of four blocks share eight; none can go on, so none takes blocks from another over and over."""
    driver = Driver(num_blocks=8, enable_prefix_caching=caching)
    for seq_id in range(3):
        assert driver.add(seq_id, [10 + seq_id] * 14, structured=True, max_tokens=4) is None
    for _ in range(50):
        if not driver.step():
            break
    else:
        raise AssertionError(f"{driver.engine.stats().num_preemptions} preemptions, and none can sample")
    for seq_id in range(3):
        driver.engine.set_grammar_ready(seq_id)
    driver.drain()
    assert [len(driver.tokens[seq_id]) for seq_id in range(3)] == [4, 4, 4]
