"""Two steps in flight: the same tokens as with one, whatever happens between them."""

from __future__ import annotations

import pytest

from tests.engine.columns import i32, ints, plan_rows
from tests.engine.driver import Driver
from tests.engine.fake_model import continuation

PROMPTS = [[20, 21, 22], [23, 24, 25, 26, 27, 28], [29], [20, 21, 30, 31]]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_blocks", [40, 9, 6])
@pytest.mark.parametrize("caching", [False, True])
def test_tokens_are_those_of_each_request_alone(overlap: bool, num_blocks: int, caching: bool) -> None:
    driver = Driver(
        async_scheduling=overlap, num_blocks=num_blocks, block_size=3, enable_prefix_caching=caching, max_model_len=18
    )
    for seq_id, prompt in enumerate(PROMPTS):
        driver.add(seq_id, prompt, max_tokens=10)
    driver.drain()
    assert driver.tokens == {seq_id: continuation(prompt, 10) for seq_id, prompt in enumerate(PROMPTS)}
    assert (driver.engine.stats().num_preemptions > 0) == (num_blocks < 40)


def test_a_row_names_the_token_that_the_step_before_samples() -> None:
    driver = Driver(async_scheduling=True)
    driver.add(1, 5, max_tokens=9)
    driver.add(2, 3, max_tokens=9)
    assert driver.schedule()
    assert driver.schedule()
    assert driver.engine.steps_in_flight == 2
    assert not driver.schedule()
    assert [row.tokens for row in plan_rows(driver.flights[1])] == [[-1], [-2]]
    assert ints(driver.flights[1].position, "q") == [1, 1]


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_nothing_is_planned_past_a_certain_end(max_tokens: int) -> None:
    driver = Driver(async_scheduling=True)
    driver.add(1, 5, max_tokens=max_tokens)
    driver.drain()
    assert len(driver.row_lengths) == max_tokens
    assert driver.ends[1].completion_tokens == max_tokens


def test_a_stop_in_flight_costs_one_row_that_nobody_sees() -> None:
    prompt = [20, 21, 22]
    first = continuation(prompt, 1)
    driver = Driver(async_scheduling=True)
    driver.add(1, prompt, max_tokens=9, stop_token_ids=first)
    driver.drain()
    assert len(driver.row_lengths) == 2
    assert driver.tokens[1] == first
    assert driver.ends[1].reason == "stop"


@pytest.mark.parametrize("after_steps", [1, 2])
def test_an_abort_in_flight_frees_blocks_at_once(after_steps: int) -> None:
    driver = Driver(async_scheduling=True, num_blocks=4, block_size=2)
    driver.add(1, 6, max_tokens=2)
    for _ in range(after_steps):
        driver.schedule()
    driver.engine.abort(1, "cancel")
    assert driver.engine.stats().blocks_free == 4
    driver.add(2, [20, 21, 22, 23], max_tokens=2)
    driver.drain()
    assert driver.tokens == {2: continuation([20, 21, 22, 23], 2)}


def test_the_token_of_one_preempted_in_flight_counts() -> None:
    driver = Driver(async_scheduling=True, num_blocks=5, block_size=2, max_model_len=10)
    driver.add(1, [20, 21, 22], max_tokens=7)
    driver.add(2, [23, 24, 25], max_tokens=5)
    driver.drain()
    assert driver.ends[2].preemptions > 0
    assert driver.tokens == {1: continuation([20, 21, 22], 7), 2: continuation([23, 24, 25], 5)}


@pytest.mark.parametrize("in_flight", [0, 1, 2])
def test_a_lost_step_drops_all_that_is_in_flight(in_flight: int) -> None:
    driver = Driver(async_scheduling=True, enable_prefix_caching=True)
    driver.add(1, [20, 21, 22, 23, 24], max_tokens=6)
    driver.step()
    while len(driver.flights) < in_flight:
        assert driver.schedule()
    driver.fail_step()
    stats = driver.engine.stats()
    assert (stats.blocks_live, stats.blocks_cached, driver.engine.steps_in_flight) == (0, 0, 0)
    driver.drain()
    assert driver.tokens[1] == continuation([20, 21, 22, 23, 24], 6)


def test_steps_are_closed_in_order() -> None:
    driver = Driver(async_scheduling=True)
    driver.add(1, 4, max_tokens=5)
    driver.schedule()
    driver.schedule()
    with pytest.raises(ValueError, match="step 2"):
        driver.engine.apply(driver.flights[1].step_id, i32([50]), 0.0)
    driver.drain()
    assert driver.ends[1].completion_tokens == 5


@pytest.mark.parametrize(("token", "reason"), [(-1, "abort"), (-2, "structured_output_failed")])
def test_no_token_ends_a_sequence_that_is_planned_ahead(token: int, reason: str) -> None:
    driver = Driver(async_scheduling=True)
    engine = driver.engine
    driver.add(1, 4, max_tokens=5)
    plans = [engine.schedule(0.0), engine.schedule(0.0)]
    assert plans[0] is not None
    assert plans[1] is not None
    engine.apply(plans[0].step_id, i32([token]), 0.0)
    engine.apply(plans[1].step_id, i32([token]), 0.0)
    driver.look()
    assert driver.ends[1].reason == reason
    assert driver.ends[1].completion_tokens == 0
    assert engine.stats().blocks_live == 0


def test_a_step_with_drafts_is_not_run_ahead_of() -> None:
    driver = Driver(async_scheduling=True, max_draft_tokens=2)
    driver.add(1, [20, 21], max_tokens=6, golden_tokens=i32(continuation([20, 21], 6)), golden_mode="draft")
    assert driver.schedule()
    assert not driver.engine.has_work
    assert not driver.schedule()
