"""Mistakes that were found by reading: each test is one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from airside import _core
from tests.engine.columns import IMAGE, config, i32, ints, plan_rows, request
from tests.engine.driver import Driver
from tests.engine.fake_model import continuation

STEM = [20, 21, 22, 23, 24, 25, 26, 27]


@pytest.mark.parametrize("rule", ["least_waste", "most_output", "last"])
def test_nobody_gives_blocks_that_bring_nothing(rule: str) -> None:
    """All blocks of the parked one are shared, so taking them frees none; who has one of his own gives that."""
    driver = Driver(num_blocks=5, enable_prefix_caching=True, victim_rule=rule)
    driver.add(1, [30, 31, 32], priority=-1, max_tokens=8)  # takes a third block at its sixth token
    driver.add(2, [*STEM, 28], structured=True)  # computes two full blocks, and parks
    driver.step()
    driver.add(3, [*STEM, 29], max_tokens=8)  # shares them, and has a third
    while 1 not in driver.ends:
        assert driver.step()
    for seq_id in (2, 3):
        driver.engine.abort(seq_id, "it is enough")
    driver.look()
    assert [driver.ends[seq_id].preemptions for seq_id in (1, 2, 3)] == [0, 0, 1]


def test_drafts_leave_the_decodes_behind_them_their_blocks() -> None:
    """Three blocks are free, and the three behind the first in order each need one to go on."""
    driver = Driver(num_blocks=9, max_draft_tokens=5)
    golden = i32(continuation(STEM[:4], 20))
    driver.add(1, STEM[:4], golden_tokens=golden, golden_mode="draft", max_tokens=20)
    for seq_id in (2, 3, 4):
        driver.add(seq_id, [seq_id + 28] * 4, max_tokens=2)
    driver.step()
    assert driver.engine.stats().blocks_free == 3
    driver.step()
    assert driver.row_lengths == [[9, 4, 4, 4], [3, 1, 1, 1]]


@pytest.mark.parametrize(
    ("values", "sampled"), [({}, IMAGE), ({"image_token_id": None, "vocab_size": 50}, 50)], ids=["image", "vocabulary"]
)
def test_a_token_that_no_model_makes_fails_the_result(values: dict[str, Any], sampled: int) -> None:
    """Taken in, it would be asked for again by every later step, and could not be computed by any."""
    engine = _core.Engine(config(**values))
    engine.add(request(1, [20, 21, 22]), 0.0)
    plan = engine.schedule(0.0)
    assert plan is not None
    with pytest.raises(ValueError, match=f"sampled\\[0\\] is {sampled}"):
        engine.apply(plan.step_id, i32([sampled]), 0.0)
    engine.check()
    engine.apply(plan.step_id, i32([9]), 0.0)
    assert ints(engine.output_ids(1)) == [9]


def test_golden_drafts_are_spoilt_by_the_whole_seed() -> None:
    """Seeds that differ in their upper half alone do not spoil the same places."""

    def drafts(seed: int) -> list[int]:
        engine = _core.Engine(config(max_draft_tokens=30, max_model_len=60))
        golden = {"golden_tokens": i32([20] * 30), "golden_mode": "draft", "golden_acceptance": 0.5}
        engine.add(request(1, [20, 21, 22], seed=seed, **golden), 0.0)
        plan = engine.schedule(0.0)
        assert plan is not None
        return plan_rows(plan)[0].drafts

    assert drafts(1) == drafts(1)
    assert drafts(1) != drafts(1 + 2**32)


def test_time_without_workers_is_told() -> None:
    """Whoever had computed something when the workers went lost it, and waited for it."""
    driver = Driver()
    driver.add(1, 6, max_tokens=4)
    driver.step()
    driver.add(3, 6, max_tokens=1)  # has computed nothing yet
    driver.now = 5.0
    driver.fail_step()
    driver.now = 8.0
    driver.drain()
    assert driver.ends[1].preempted_s == pytest.approx(3.0)
    assert driver.ends[3].preempted_s == 0
    assert driver.ends[1].preemptions == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: config(image_token_id=-1), "image_token_id is -1"),
        (lambda: config(image_token_id=30, vocab_size=30), "image_token_id is 30"),
    ],
)
def test_an_image_token_outside_the_vocabulary_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_fewer_alternatives_than_none_are_refused(field: str) -> None:
    rejection = _core.Engine(config()).add(request(1, 3, **{field: -2}), 0.0)
    assert rejection is not None
    assert rejection.code == "invalid"
    assert rejection.detail.startswith(f"{field} is -2")


@pytest.mark.parametrize("has_picture", [False, True])
def test_waiting_for_a_picture_saves_nothing_up(has_picture: bool) -> None:
    """While one of ann's cannot move, bob's are served; that does not put her others before those of a new user."""
    driver = Driver(max_num_seqs=1, max_queued_requests=100, max_queued_tokens=10_000)
    if has_picture:
        driver.add(0, [IMAGE, 20], image_positions=[0], user="ann")
    for seq_id in range(1, 11):
        driver.add(seq_id, 30, user="bob", max_tokens=5)
    driver.drain()
    for seq_id in range(11, 21):
        driver.add(seq_id, 30, user="ann", max_tokens=5)
    driver.add(21, 30, user="cid", max_tokens=5)
    driver.drain()
    assert driver.admitted[10:12] == [11, 21]
