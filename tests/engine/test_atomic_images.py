"""Images whose tokens attend to one another: never in two steps, and never waiting for ever."""

from __future__ import annotations

from typing import Any

import pytest

from airside import _core
from tests.engine.columns import IMAGE, config, i32, plan_rows, request
from tests.engine.driver import Driver

MARK = 6


def atomic(**values: Any) -> Driver:  # Any: fields of EngineConfig
    return Driver(**{"atomic_images": True, "max_num_batched_tokens": 10, **values})


def add_with_image(driver: Driver, seq_id: int, before: int, image: int, after: int, **values: Any) -> None:
    """So many tokens of text, of a picture between two other tokens of its expansion, and of text again."""
    text = [100 + i for i in range(before + after)]
    tokens = [*text[:before], IMAGE, *text[before:]]
    assert driver.add(seq_id, tokens, image_positions=[before], **{"max_tokens": 3, **values}) is None
    driver.engine.set_shape(seq_id, 0, i32([90, *[IMAGE] * image, 91]))
    driver.look()
    if driver.engine.status(seq_id) is not None:
        driver.engine.set_ready(seq_id, 0)


def test_a_chunk_ends_before_a_picture_or_behind_it() -> None:
    driver = atomic()
    add_with_image(driver, 1, before=4, image=8, after=6)
    driver.drain()
    # Text and the token before the picture, the picture and two of what follows, the rest.
    assert [lengths[0] for lengths in driver.row_lengths[:3]] == [5, 10, 5]


def test_without_the_setting_it_is_cut_anywhere() -> None:
    driver = atomic(atomic_images=False)
    add_with_image(driver, 1, before=4, image=8, after=6)
    driver.drain()
    assert [lengths[0] for lengths in driver.row_lengths[:2]] == [10, 10]


def test_a_picture_that_fills_a_step_passes_decodes_that_leave_it_no_room() -> None:
    """Somebody always decodes, so it would never fit beside them."""
    driver = atomic(max_model_len=60, num_blocks=60)
    driver.add(1, 3, max_tokens=40)
    driver.step()
    add_with_image(driver, 2, before=0, image=10, after=1, max_tokens=1)
    for _ in range(4):
        driver.step()
    assert 2 in driver.ends
    assert 1 not in driver.ends


@pytest.mark.parametrize("mode", ["force", "draft"])
def test_drafts_do_not_keep_a_picture_waiting(mode: str) -> None:
    driver = atomic(max_model_len=60, num_blocks=60, max_draft_tokens=9)
    golden = {"golden_tokens": i32(range(20, 70)), "golden_mode": mode}
    driver.add(1, 3, max_tokens=50, **golden)
    driver.step()
    driver.add(2, [IMAGE, 100], image_positions=[0], max_tokens=1)
    driver.engine.set_shape(2, 0, i32([IMAGE] * 8))
    driver.engine.set_ready(2, 0)
    driver.step()
    driver.step()
    assert 2 in driver.ends
    assert 1 not in driver.ends


@pytest.mark.parametrize("chunked", [True, False])
def test_a_picture_longer_than_a_step_ends_its_sequence(chunked: bool) -> None:
    driver = atomic(enable_chunked_prefill=chunked)
    add_with_image(driver, 1, before=1, image=10, after=1)
    add_with_image(driver, 2, before=1, image=11, after=1)
    assert driver.ends[2].reason == "prompt_length_exceeded"
    assert "11 tokens in one step, but a step has 10" in driver.ends[2].detail
    driver.drain()
    assert driver.ends[1].reason == "length"


def test_what_follows_a_cached_part_of_a_picture_is_computed_at_once() -> None:
    """The hit ends inside the picture; the row from there on reaches its end."""
    driver = atomic(enable_prefix_caching=True, block_size=4)
    for seq_id in (1, 2):
        add_with_image(driver, seq_id, before=0, image=9, after=0, image_hashes=[b"a" * 16], max_tokens=1)
        driver.drain()
    assert driver.ends[2].cached_tokens == 8  # one token before the picture, seven of its nine
    assert driver.row_lengths[-1] == [3]


def test_a_picture_at_the_end_of_a_structured_prompt_waits_for_the_grammar() -> None:
    """All but the last token could be computed, but the last is a part of the picture."""
    driver = atomic()
    tokens = [100, 101, IMAGE]
    assert driver.add(1, tokens, image_positions=[2], structured=True, max_tokens=1) is None
    driver.engine.set_shape(1, 0, i32([IMAGE] * 5))
    driver.engine.set_ready(1, 0)
    while driver.step():
        pass
    assert driver.row_lengths == [[2]]
    assert not driver.engine.has_work
    driver.engine.set_grammar_ready(1)
    driver.drain()
    assert driver.row_lengths == [[2], [5]]


def test_a_mark_that_is_another_token() -> None:
    driver = Driver(image_mark_id=MARK)
    assert driver.add(1, [20, MARK, 21], image_positions=[1], max_tokens=2) is None
    driver.engine.set_shape(1, 0, i32([MARK, IMAGE, IMAGE, 22]))
    driver.engine.set_ready(1, 0)
    plan = driver.engine.schedule(0.0)
    assert plan is not None
    [row] = plan_rows(plan)
    assert row.tokens == [20, MARK, IMAGE, IMAGE, 22, 21]
    assert plan.images == [(1, 0, 0, 2)]


@pytest.mark.parametrize(
    ("tokens", "positions", "says"),
    [
        ([20, IMAGE], [1], "image position 1 holds token 7 and not the image mark 6"),
        ([20, MARK], [], "the prompt holds the image mark 6 1 times for 0 images"),
        ([20, IMAGE, MARK], [2], r"token_ids\[1\] is 7, which only images bring; write the image mark 6"),
    ],
)
def test_marks_are_counted_and_image_tokens_refused(tokens: list[int], positions: list[int], says: str) -> None:
    engine = _core.Engine(config(image_mark_id=MARK))
    rejection = engine.add(request(1, tokens, image_positions=positions), 0.0)
    assert rejection is not None
    assert rejection.code == "invalid"
    assert says.replace("\\", "") in rejection.detail


@pytest.mark.parametrize("token", [MARK, IMAGE])
def test_neither_token_is_made_by_a_model(token: int) -> None:
    engine = _core.Engine(config(image_mark_id=MARK, max_draft_tokens=2))
    golden = {"golden_tokens": i32([token]), "golden_mode": "force"}
    rejection = engine.add(request(1, 3, **golden), 0.0)
    assert rejection is not None
    assert f"golden_tokens[0] is {token}" in rejection.detail
    engine.add(request(2, 3), 0.0)
    plan = engine.schedule(0.0)
    assert plan is not None
    with pytest.raises(ValueError, match=f"sampled\\[0\\] is {token}"):
        engine.apply(plan.step_id, i32([token]), 0.0)


def test_a_mark_without_an_image_token_is_refused() -> None:
    with pytest.raises(ValueError, match="an image_mark_id, but no image_token_id"):
        config(image_token_id=None, image_mark_id=MARK)
    with pytest.raises(ValueError, match="image_mark_id is 30, but must be below vocab_size 30"):
        config(image_mark_id=30, vocab_size=30)
