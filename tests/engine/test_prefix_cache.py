"""What is found again, what is not, and that it is the right thing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.columns import IMAGE, i32, ints, plan_rows
from tests.engine.driver import Driver
from tests.engine.fake_model import continuation

PROMPT = [20 + i for i in range(12)]


def cached_driver(**values: Any) -> Driver:  # Any: fields of EngineConfig
    return Driver(**{"enable_prefix_caching": True, "block_size": 4, **values})


def run(driver: Driver, seq_id: int, tokens: list[int], **values: Any) -> int:  # Any: fields of Request
    """How many of its tokens were found."""
    assert driver.add(seq_id, tokens, max_tokens=values.pop("max_tokens", 1), **values) is None
    driver.drain()
    return driver.ends[seq_id].cached_tokens


@pytest.mark.parametrize(
    ("tokens", "cached"),
    [
        (PROMPT, 8),  # the last token is always computed
        ([*PROMPT, 50], 12),
        (PROMPT[:9], 8),
        (PROMPT[:8], 4),
        (PROMPT[:5], 4),
        (PROMPT[:4], 0),
        ([*PROMPT[:7], 99, *PROMPT[8:]], 4),
        ([99, *PROMPT[1:]], 0),
    ],
)
def test_leading_full_blocks_are_found(tokens: list[int], cached: int) -> None:
    driver = cached_driver()
    assert run(driver, 1, PROMPT) == 0
    assert run(driver, 2, tokens, max_tokens=5) == cached
    assert driver.tokens[2] == continuation(tokens, 5)
    stats = driver.engine.stats()
    assert stats.prefix_cache_hits == cached
    assert stats.prefix_cache_queries >= cached
    assert stats.recomputed_tokens == 0


def test_output_is_found_too() -> None:
    driver = cached_driver()
    run(driver, 1, PROMPT[:6], max_tokens=7)
    conversation = [*PROMPT[:6], *driver.tokens[1], 30]
    assert run(driver, 2, conversation, max_tokens=4) == 12
    assert driver.tokens[2] == continuation(conversation, 4)


@pytest.mark.parametrize(("first", "second", "cached"), [("", "", 8), ("a", "a", 8), ("", "a", 0), ("a", "b", 0)])
def test_only_requests_of_the_same_salt_share(first: str, second: str, cached: int) -> None:
    driver = cached_driver()
    run(driver, 1, PROMPT, cache_salt=first)
    assert run(driver, 2, PROMPT, cache_salt=second) == cached


@pytest.mark.parametrize(
    ("first", "second", "cached"),
    [([b"a" * 16], [b"a" * 16], 8), ([b"a" * 16], [b"b" * 16], 0), ([], [], 0), ([b"a" * 16], [], 0)],
)
def test_pictures_are_shared_by_content(first: list[bytes], second: list[bytes], cached: int) -> None:
    driver = cached_driver()
    for seq_id, hashes in [(1, first), (2, second)]:
        driver.add(seq_id, [20, IMAGE, 21, 22], image_positions=[1], image_hashes=hashes, max_tokens=2)
        driver.engine.set_shape(seq_id, 0, i32([IMAGE] * 7))
        driver.engine.set_ready(seq_id, 0)
        driver.drain()
    assert driver.ends[2].cached_tokens == cached
    assert (driver.tokens[1] == driver.tokens[2]) == (bool(first) and first == second)


def test_requests_of_one_step_share() -> None:
    driver = cached_driver()
    for seq_id in range(3):
        driver.add(seq_id, PROMPT, max_tokens=3)
    driver.schedule()
    rows = plan_rows(driver.flights[0])
    assert [(row.begin, row.end) for row in rows] == [(0, 12), (8, 12), (8, 12)]
    assert rows[0].blocks[:2] == rows[1].blocks[:2] == rows[2].blocks[:2]
    assert len({row.blocks[2] for row in rows}) == 3
    assert driver.engine.stats().blocks_live == 5
    driver.drain()
    assert driver.tokens == dict.fromkeys(range(3), continuation(PROMPT, 3))


def test_with_state_slots_only_what_has_come_back_is_shared() -> None:
    driver = cached_driver(num_state_slots=4)
    driver.add(1, PROMPT)
    driver.add(2, PROMPT, max_tokens=2)
    driver.schedule()
    first, second = plan_rows(driver.flights[0])
    assert (first.begin, second.begin) == (0, 0)
    assert (first.state_slot, second.state_slot) == (0, 1)
    driver.apply()
    driver.add(3, PROMPT, max_tokens=2)
    driver.schedule()
    row = plan_rows(driver.flights[0])[-1]
    assert (row.seq_id, row.begin, row.state_from) == (3, 8, row.blocks[1])
    driver.apply()
    driver.schedule()
    assert plan_rows(driver.flights[0])[-1].state_from == -1


def test_log_probabilities_of_a_prompt_are_computed_not_found() -> None:
    driver = cached_driver()
    run(driver, 1, PROMPT)
    driver.add(2, PROMPT, prompt_logprobs=0)
    driver.schedule()
    plan = driver.flights[0]
    assert [(row.begin, row.end) for row in plan_rows(plan)] == [(0, 12)]
    ((row, start, alternatives, targets),) = plan.prompt_logprobs
    assert (row, start, alternatives, ints(targets)) == (0, 0, 0, PROMPT[1:])


def test_sharing_counts_as_taking() -> None:
    """Cached blocks are free, but who shares them has them: there is no room for the same blocks twice."""
    driver = cached_driver(num_blocks=4, max_model_len=16)
    run(driver, 1, PROMPT)
    assert driver.engine.stats().blocks_cached == 3
    # 3 shared blocks and one more are all there are.
    assert run(driver, 2, [*PROMPT, 40, 41]) == 12
    assert run(driver, 3, [*PROMPT, 50, 51]) == 12


def test_the_oldest_go_first_and_ends_before_beginnings() -> None:
    driver = cached_driver(num_blocks=6, max_model_len=24)
    old, new = [60 + i for i in range(9)], PROMPT[:9]
    run(driver, 1, old)
    run(driver, 2, new)
    # Three blocks: two that never held anything, and the oldest one that did.
    run(driver, 3, [80 + i for i in range(9)])
    assert run(driver, 4, old) == 4
    assert run(driver, 5, new) == 4


def test_a_cache_hit_is_not_computed_again() -> None:
    """A preempted sequence takes up what is left of its blocks, which then was not lost."""
    driver = cached_driver(num_blocks=6, block_size=4, max_model_len=24)
    driver.add(1, PROMPT[:6], max_tokens=12)
    driver.add(2, [60 + i for i in range(6)], max_tokens=8)
    driver.drain()
    assert driver.ends[2].preemptions > 0
    assert driver.tokens == {1: continuation(PROMPT[:6], 12), 2: continuation([60 + i for i in range(6)], 8)}
    computed = sum(map(sum, driver.row_lengths))
    stats = driver.engine.stats()
    assert computed == stats.prompt_tokens + stats.recomputed_tokens + (stats.generation_tokens - 2)


def test_without_the_cache_nothing_is_kept() -> None:
    driver = Driver(enable_prefix_caching=False)
    assert run(driver, 1, PROMPT) == run(driver, 2, PROMPT) == 0
    stats = driver.engine.stats()
    assert (stats.blocks_cached, stats.prefix_cache_hits, stats.prefix_cache_queries) == (0, 0, 0)
