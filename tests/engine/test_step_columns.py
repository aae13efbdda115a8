"""What a plan tells the sampler beside tokens, and what comes back beside them."""

from __future__ import annotations

import array
from typing import Any

import pytest

from airside import _core
from airside.proto.logprob_record import read_records, record_bytes
from tests.engine.columns import IMAGE, f32, i32, ints, plan_rows, token_rows
from tests.engine.driver import Driver
from tests.engine.fake_model import continuation

PROMPT = [20, 21, 22, 23, 24]
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5}
RULES: list[dict[str, Any]] = [  # Any: fields of Request
    PENALTIES,
    {"logit_bias": {3: -2.0, 4: 1.0}},
    {"allowed_token_ids": [1, 2, 3]},
]


def plan_of(driver: Driver) -> _core.StepPlan:
    assert driver.schedule()
    return driver.flights[-1]


@pytest.mark.parametrize("rules", RULES)
def test_rules_are_told_once_and_taken_back_once(rules: dict[str, Any]) -> None:  # Any: as above
    driver = Driver(async_scheduling=True, max_num_batched_tokens=3)
    driver.add(1, PROMPT, max_tokens=3, **rules)
    (opened,) = plan_of(driver).opened
    assert (opened.seq_id, opened.num_prompt_tokens, ints(opened.token_ids)) == (1, 5, PROMPT)
    assert opened.repetition_penalty == rules.get("repetition_penalty", 1.0)
    assert opened.presence_penalty == rules.get("presence_penalty", 0.0)
    assert opened.frequency_penalty == rules.get("frequency_penalty", 0.0)
    assert opened.logit_bias == rules.get("logit_bias", {})
    assert list(opened.allowed_token_ids) == rules.get("allowed_token_ids", [])
    plans = [plan_of(driver)]
    while driver.flights:
        driver.apply()
        if driver.schedule():
            plans.append(driver.flights[-1])
    driver.add(2, PROMPT, max_tokens=1)
    last = plan_of(driver)
    assert [plan.opened for plan in [*plans, last]] == [[]] * (len(plans) + 1)
    assert [ints(plan.closed, "Q") for plan in plans] == [[]] * len(plans)
    assert ints(last.closed, "Q") == [1]
    driver.apply()
    driver.add(3, PROMPT)
    assert ints(plan_of(driver).closed, "Q") == []


def test_rules_are_told_again_to_new_workers_with_what_was_made() -> None:
    driver = Driver()
    driver.add(1, PROMPT, max_tokens=5, **PENALTIES)
    driver.add(2, PROMPT, max_tokens=5)
    driver.step()
    driver.step()
    driver.fail_step()
    (opened,) = plan_of(driver).opened
    assert (opened.seq_id, ints(opened.token_ids)) == (1, [*PROMPT, *continuation(PROMPT, 2)])
    assert ints(driver.flights[0].closed, "Q") == []


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("chunk", [1, 2, 64])
def test_tails_are_the_tokens_before_each_row(length: int, chunk: int) -> None:
    driver = Driver(tail_tokens=length, max_num_batched_tokens=chunk, async_scheduling=True)
    driver.add(1, PROMPT, max_tokens=4)
    known = [-1] * length + PROMPT + continuation(PROMPT, 4)
    while True:
        while driver.schedule():
            (row,) = plan_rows(driver.flights[-1])
            assert row.tail == known[row.begin : row.begin + length]
        if not driver.flights:
            break
        driver.apply()
    assert driver.tokens[1] == continuation(PROMPT, 4)


def test_bans_are_of_sampled_positions() -> None:
    """The first may not be the end, with two drafts before the least number of tokens is reached."""
    tokens = continuation(PROMPT, 8)
    driver = Driver(max_draft_tokens=3)
    golden: dict[str, Any] = {"golden_tokens": i32(tokens), "golden_mode": "draft"}  # Any: fields of Request
    driver.add(1, PROMPT, min_tokens=2, stop_token_ids=[50, 51], max_tokens=8, **golden)
    driver.add(2, PROMPT, max_tokens=2)
    first, second = plan_rows(plan_of(driver))
    assert [sorted(banned) for banned in first.banned] == [[50, 51]] * 2 + [[]] * 2
    assert second.banned == [[]]


def records(k: int, tags: list[int]) -> bytes:
    """A record of k alternatives for each tag, which is its log-probability."""
    words = record_bytes(k) // 4
    return b"".join(array.array("f", [float(tag)] * words).tobytes() for tag in tags)


def test_records_go_with_the_tokens_that_count() -> None:
    driver = Driver(max_draft_tokens=3)
    golden: dict[str, Any] = {"golden_tokens": i32([30, 31, 99, 33]), "golden_mode": "draft"}  # Any: as above
    driver.add(1, PROMPT, max_tokens=8)
    driver.add(2, PROMPT, max_tokens=8, logprobs=2, **golden)
    driver.add(3, PROMPT, max_tokens=8, logprobs=0)
    plan = plan_of(driver)
    assert [row.logprobs for row in plan_rows(plan)] == [-1, 2, 0]
    data = records(2, [10, 11, 12, 13]) + records(0, [20])
    driver.engine.apply(plan.step_id, i32([40, 30, 31, 32, 33, 50]), 0.0, logprobs=data)
    (output,) = driver.engine.take_outputs()
    assert token_rows(output) == [(1, [40]), (2, [30, 31, 32]), (3, [50])]
    assert output.step_tokens == 3 * len(PROMPT) + 3
    sizes = ints(output.logprob_sizes)
    assert sizes == [0, 3 * record_bytes(2), record_bytes(0)]
    assert [record.logprob for record in read_records(output.logprobs[: sizes[1]], 3)] == [10, 11, 12]
    assert [record.logprob for record in read_records(output.logprobs[sizes[1] :], 1)] == [20]


@pytest.mark.parametrize("chunk", [1, 2, 3, 64])
@pytest.mark.parametrize("lost_after", [None, 1, 2])
def test_each_prompt_position_is_scored_once(chunk: int, lost_after: int | None) -> None:
    driver = Driver(max_num_batched_tokens=chunk, enable_prefix_caching=True)
    driver.add(1, PROMPT, max_tokens=2, prompt_logprobs=1)
    told: list[float] = []
    for step in range(20):
        plan = driver.engine.schedule(0.0)
        if plan is None:
            break
        if step == lost_after:
            driver.engine.fail_step(0.0)
            continue
        (row,) = plan_rows(plan)
        targets: list[int] = []
        for index, start, k, asked in plan.prompt_logprobs:
            assert (index, k) == (0, 1)
            assert ints(asked) == PROMPT[row.begin + start + 1 :][: len(ints(asked))]
            targets += ints(asked)
        driver.engine.apply(
            plan.step_id, i32([50] * row.num_sampled), 0.0, prompt_logprobs=records(1, targets) if targets else b""
        )
        for output in driver.engine.take_outputs():
            assert ints(output.prompt_seq_ids, "Q") == [1] * bool(output.prompt_logprobs)
            assert sum(ints(output.prompt_sizes)) == len(output.prompt_logprobs)
            count = len(output.prompt_logprobs) // record_bytes(1)
            told += [record.logprob for record in read_records(output.prompt_logprobs, count)] if count else []
    assert told == [float(token) for token in PROMPT[1:]]


@pytest.mark.parametrize(
    ("columns", "what"),
    [
        ({"logprobs": b"\0" * 4}, "logprobs"),
        ({"prompt_logprobs": b"\0" * 16}, "prompt_logprobs"),
        ({"num_drafts": i32([1, 1])}, "num_drafts"),
        ({"num_drafts": i32([2]), "draft_tokens": i32([1]), "draft_confidences": f32([0.5])}, "draft_tokens"),
        ({"num_drafts": i32([1]), "draft_tokens": i32([1]), "draft_confidences": b""}, "draft_confidences"),
    ],
)
def test_a_result_that_does_not_fit_changes_nothing(columns: dict[str, bytes], what: str) -> None:
    driver = Driver(draft_method="mtp", max_draft_tokens=2)
    driver.add(1, PROMPT, max_tokens=2)
    plan = plan_of(driver)
    with pytest.raises(ValueError, match=what):
        driver.engine.apply(plan.step_id, i32([50]), 0.0, **columns)
    driver.engine.check()
    driver.drain()
    assert driver.tokens[1] == continuation(PROMPT, 2)


def test_a_client_stop_counts_the_tokens_before_it() -> None:
    driver = Driver(async_scheduling=True)
    driver.add(1, PROMPT)
    for _ in range(4):
        driver.step()
    assert driver.engine.stop(1, 2, "stop string 'END'")
    assert not driver.engine.stop(1, 2, "again")
    driver.drain()
    finish = driver.ends[1]
    assert (finish.reason, finish.detail, finish.completion_tokens) == ("stop", "stop string 'END'", 2)
    assert driver.engine.stats().blocks_live == 0


@pytest.mark.parametrize(("num_tokens", "counted"), [(-1, 0), (0, 0), (1, 1), (2, 1)])
def test_a_client_stop_counts_nothing_that_was_not_made(num_tokens: int, counted: int) -> None:
    driver = Driver()
    driver.add(1, PROMPT)
    driver.step()
    assert driver.engine.stop(1, num_tokens, "stop string")
    driver.drain()
    assert driver.ends[1].completion_tokens == counted


def test_times_of_pictures_prefill_and_preemption() -> None:
    driver = Driver(num_blocks=4, block_size=2, max_model_len=8, max_num_batched_tokens=4)
    driver.add(1, [20, IMAGE, 21], image_positions=[1], image_hashes=[b"a" * 16], max_tokens=5)
    driver.engine.set_shape(1, 0, i32([IMAGE]))
    driver.now = 2.0
    driver.step()
    driver.engine.set_ready(1, 0)
    driver.now = 3.0
    driver.step()
    driver.add(2, [30, 31], arrival=3.0, max_tokens=5)
    while driver.engine.status(2) is not None:
        driver.now += 1.0
        driver.step()
    first, second = driver.ends[1], driver.ends[2]
    # News of pictures brings no time: it counts as of the next one that is told.
    assert (first.vision_wait_s, first.queued_s, first.prefill_s, first.preempted_s) == (3.0, 2.0, 1.0, 0.0)
    assert (second.vision_wait_s, second.prefill_s) == (0.0, 0.0)
    assert second.preempted_s > 0
    assert second.preemptions > 0


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"logit_bias": {100: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
        ({"allowed_token_ids": [1, 100]}, "allowed_token_ids"),
        ({"golden_tokens": i32([1, 100]), "golden_mode": "force"}, "golden_tokens"),
        ({"golden_tokens": i32([1]), "golden_mode": ""}, "golden"),
        ({"golden_tokens": b"", "golden_mode": "force"}, "golden"),
        ({"golden_tokens": i32([1]), "golden_mode": "draft", "golden_acceptance": 1.5}, "golden_acceptance"),
        ({"drafts_max": -1}, "drafts_max"),
        ({"image_hashes": [b"a" * 16]}, "image_hashes"),
    ],
)
def test_a_fault_is_named(values: dict[str, Any], what: str) -> None:  # Any: fields of Request
    driver = Driver(vocab_size=100, max_draft_tokens=2)
    rejection = driver.engine.add(_request(values), 0.0)
    assert rejection is not None
    assert rejection.code == "invalid"
    assert what in rejection.detail


def _request(values: dict[str, Any]) -> _core.Request:  # Any: fields of Request
    return _core.Request(client=0, seq_id=1, token_ids=i32(PROMPT), arrival=0.0, **values)
