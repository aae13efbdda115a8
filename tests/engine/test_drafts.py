"""Drafts make steps fewer, never tokens other."""

from __future__ import annotations

from typing import Any

import pytest

from airside import _core
from tests.engine.columns import IMAGE, config, f32, i32, plan_rows, request, token_rows
from tests.engine.driver import Driver
from tests.engine.fake_model import continuation

PROMPT = [20, 21, 22, 20, 21, 22, 20, 21]
MADE = 16
EXPECTED = continuation(PROMPT, MADE)


def drafted(draft_method: str, **values: Any) -> Driver:  # Any: fields of Request
    driver = Driver(draft_method=draft_method, max_draft_tokens=4, async_scheduling=True)
    driver.add(1, PROMPT, max_tokens=MADE, **values)
    driver.drain()
    return driver


def golden(tokens: list[int], acceptance: float = 1.0, mode: str = "draft") -> dict[str, Any]:  # Any: as above
    return {"golden_tokens": i32(tokens), "golden_mode": mode, "golden_acceptance": acceptance}


@pytest.mark.parametrize("method", ["none", "ngram", "mtp"])
@pytest.mark.parametrize("drafts_max", [None, 0, 1, 9])
def test_tokens_are_those_without_drafts(method: str, drafts_max: int | None) -> None:
    driver = drafted(method, drafts_max=drafts_max)
    assert driver.tokens[1] == EXPECTED
    finish = driver.ends[1]
    assert 0 <= finish.accepted_tokens <= finish.draft_tokens
    assert (finish.draft_tokens > 0) == (method != "none" and drafts_max != 0)
    assert len(driver.row_lengths) == MADE - finish.accepted_tokens
    longest = max(length for step in driver.row_lengths[1:] for length in step)
    assert longest <= 1 + (4 if drafts_max is None else min(drafts_max, 4))


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
def test_golden_drafts_are_accepted_as_often_as_asked(acceptance: float) -> None:
    driver = drafted("none", **golden(EXPECTED, acceptance))
    assert driver.tokens[1] == EXPECTED
    finish = driver.ends[1]
    assert finish.draft_tokens > 0
    if acceptance in (0.0, 1.0):
        assert finish.accepted_tokens == acceptance * finish.draft_tokens
    else:
        assert 0 < finish.accepted_tokens < finish.draft_tokens
    assert drafted("none", **golden(EXPECTED, acceptance)).row_lengths == driver.row_lengths


@pytest.mark.parametrize("wrong", range(0, MADE - 1, 5))
def test_after_a_wrong_draft_nothing_was_there(wrong: int) -> None:
    tokens = [*EXPECTED[:wrong], EXPECTED[wrong] + 50, *EXPECTED[wrong + 1 :]]
    driver = drafted("none", **golden(tokens))
    assert driver.tokens[1] == EXPECTED
    assert driver.ends[1].accepted_tokens < driver.ends[1].draft_tokens


def test_a_stop_among_accepted_drafts_is_the_end() -> None:
    stop = EXPECTED[2]
    driver = drafted("none", stop_token_ids=[stop], **golden(EXPECTED))
    assert driver.tokens[1] == EXPECTED[: EXPECTED.index(stop) + 1]
    assert driver.ends[1].reason == "stop"


@pytest.mark.parametrize("max_tokens", [1, 2, 4, 5, 6])
def test_drafts_do_not_reach_past_the_length(max_tokens: int) -> None:
    driver = Driver(max_draft_tokens=4)
    driver.add(1, PROMPT, max_tokens=max_tokens, **golden(EXPECTED))
    driver.drain()
    assert driver.tokens[1] == EXPECTED[:max_tokens]
    assert sum(map(sum, driver.row_lengths)) <= len(PROMPT) + max_tokens - 1


@pytest.mark.parametrize("max_model_len", [9, 10, 12, 13])
def test_drafts_do_not_reach_past_the_context(max_model_len: int) -> None:
    driver = Driver(max_draft_tokens=4, max_model_len=max_model_len, block_size=1, num_blocks=13)
    driver.add(1, PROMPT, **golden(EXPECTED))
    driver.drain()
    assert driver.tokens[1] == EXPECTED[: max_model_len - len(PROMPT)]
    assert driver.ends[1].reason == "length"


def test_drafts_take_no_blocks_from_anybody() -> None:
    driver = Driver(max_draft_tokens=4, num_blocks=8, block_size=2, max_model_len=16)
    driver.add(1, PROMPT[:2], max_tokens=9, **golden(continuation(PROMPT[:2], 9)))
    driver.add(2, [30, 31, 32, 33], max_tokens=4)
    driver.drain()
    assert driver.engine.stats().num_preemptions == 0
    assert driver.tokens == {1: continuation(PROMPT[:2], 9), 2: continuation([30, 31, 32, 33], 4)}


def test_drafts_leave_a_token_for_everybody_who_decodes() -> None:
    driver = Driver(max_draft_tokens=4, max_num_batched_tokens=6, num_blocks=32, max_model_len=40)
    prompts = {seq_id: [30 + seq_id, 40] for seq_id in range(3)}
    for seq_id, prompt in prompts.items():
        values = {} if seq_id < 2 else golden(continuation(prompt, 30))
        driver.add(seq_id, prompt, max_tokens=30, **values)
    driver.drain()
    assert driver.tokens == {seq_id: continuation(prompt, 30) for seq_id, prompt in prompts.items()}
    assert driver.row_lengths[1:7] == [[1, 1, 4]] * 6


@pytest.mark.parametrize("budget", [3, 8, 64])
def test_forced_tokens_are_the_output(budget: int) -> None:
    forced = [30 + i for i in range(12)]
    driver = Driver(max_num_batched_tokens=budget, max_draft_tokens=2)
    driver.add(1, PROMPT, **golden(forced, mode="force"))
    driver.drain()
    assert driver.tokens[1] == forced
    assert (driver.ends[1].reason, driver.ends[1].detail) == ("stop", "the golden tokens are all there")
    # All but the last are computed, in rows as long as the budget allows.
    assert sum(map(sum, driver.row_lengths)) == len(PROMPT) + len(forced) - 1
    assert len(driver.row_lengths) == -(-(len(PROMPT) + len(forced) - 1) // budget)


@pytest.mark.parametrize(("values", "made"), [({"max_tokens": 3}, 3), ({"stop_token_ids": [31]}, 2), ({}, 5)])
def test_forced_tokens_end_like_others(values: dict[str, Any], made: int) -> None:  # Any: as above
    driver = Driver()
    driver.add(1, PROMPT, **golden([30, 31, 32, 33, 34], mode="force"), **values)
    driver.drain()
    assert driver.tokens[1] == [30, 31, 32, 33, 34][:made]


@pytest.mark.parametrize("wrong", [-1, -7, IMAGE])
def test_a_proposal_that_is_no_text_is_not_taken(wrong: int) -> None:
    """A negative one would be a placeholder, the image token a picture."""
    driver = Driver(draft_method="mtp", max_draft_tokens=2)
    driver.add(1, PROMPT, max_tokens=4)
    driver.schedule()
    plan = driver.flights.pop()
    columns = {"num_drafts": i32([2]), "draft_tokens": i32([wrong, 20]), "draft_confidences": f32([0.9, 0.9])}
    driver.engine.apply(plan.step_id, i32([5]), 0.0, **columns)
    driver.schedule()
    assert [row.tokens for row in plan_rows(driver.flights[0])] == [[5]]


def test_golden_tokens_with_a_grammar_are_refused() -> None:
    assert Driver().add(1, PROMPT, structured=True, **golden([30], mode="force")) == "invalid"


@pytest.mark.parametrize("mode", ["force", "draft"])
def test_golden_tokens_that_are_pictures_are_refused(mode: str) -> None:
    assert Driver(max_draft_tokens=2).add(1, PROMPT, **golden([30, IMAGE, 31], mode=mode)) == "invalid"


def made_of(text: list[int], prompt: list[int]) -> tuple[_core.Finish, int, int]:
    """A model that makes this text, with n-gram drafts: its end, the number of steps, and of those planned ahead."""
    engine = _core.Engine(config(draft_method="ngram", max_draft_tokens=4, async_scheduling=True, **ROOM))
    assert engine.add(request(1, prompt, max_tokens=len(text)), 0.0) is None
    plans: list[_core.StepPlan] = []
    made: list[int] = []
    num_steps = num_ahead = 0
    while True:
        while (plan := engine.schedule(0.0)) is not None:
            plans.append(plan)
            num_ahead += len(plans) > 1
        plan = plans.pop(0)
        (row,) = plan_rows(plan)
        end = row.begin + len(row.tokens) - row.num_sampled + 1 - len(prompt)
        engine.apply(plan.step_id, i32([*text, 0, 0, 0, 0][end : end + row.num_sampled]), 0.0)
        engine.check()
        num_steps += 1
        for output in engine.take_outputs():
            made += [token for _, tokens in token_rows(output) for token in tokens]
            if output.finished:
                assert made == text
                return output.finished[0], num_steps, num_ahead


ROOM = {"num_blocks": 64, "block_size": 8, "max_model_len": 400, "max_num_batched_tokens": 256}
DISTINCT = list(range(1000, 1120))


def test_a_text_that_does_not_repeat_is_run_ahead_of_without_drafts() -> None:
    finish, num_steps, num_ahead = made_of(DISTINCT, PROMPT)
    assert num_steps == len(DISTINCT)
    assert num_ahead > len(DISTINCT) - 6
    assert finish.draft_tokens <= 4


def test_after_a_few_wrong_drafts_there_are_none() -> None:
    """Every pair of tokens has occurred before, and nothing follows it as it did."""
    text = [token for other in DISTINCT[:40] for token in (20, 21, other)]
    finish, num_steps, num_ahead = made_of(text, PROMPT)
    assert finish.accepted_tokens == 0
    assert 0 < finish.draft_tokens < 10
    assert num_ahead > num_steps - 10


def test_drafts_come_back_when_the_text_repeats() -> None:
    """What would have been right is noticed while nothing is drafted."""
    prompt = list(range(2000, 2100))
    finish, num_steps, _ = made_of(DISTINCT + prompt, prompt)
    assert finish.accepted_tokens > 70
    assert num_steps < len(DISTINCT) + len(prompt) // 3
    assert finish.draft_tokens - finish.accepted_tokens < 10
