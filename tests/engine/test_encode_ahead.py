"""Pictures beside decodes: encoded in a step before the one that reads them, and few at a time.

Both take long, and whoever decodes waits for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.engine.columns import IMAGE, i32, plan_rows
from tests.engine.driver import Driver

PICTURE = 4  # tokens


def driver_of(**values: Any) -> Driver:  # Any: fields of EngineConfig
    """One step at a time."""
    settings = {"max_num_batched_tokens": 100, "max_num_seqs": 40, "num_blocks": 400, "max_model_len": 80}
    return Driver(**{**settings, **values})


def decode(driver: Driver, count: int) -> None:
    """So many texts, of ids from 1000 on, that decode from now on."""
    for seq_id in range(1000, 1000 + count):
        assert driver.add(seq_id, [seq_id, 8], max_tokens=60) is None
    driver.step()


def show(
    driver: Driver,
    seq_id: int,
    before: int = 0,
    pictures: int = 1,
    **values: Any,  # Any: fields of Request
) -> None:
    """A prompt of so much text, so many pictures with a token behind each, and a last one; all pixels are in."""
    tokens = [*range(200, 200 + before), *[IMAGE] * pictures, 300]
    positions = list(range(before, before + pictures))
    assert driver.add(seq_id, tokens, image_positions=positions, max_tokens=2, **values) is None
    for index in range(pictures):
        driver.engine.set_shape(seq_id, index, i32([*[IMAGE] * PICTURE, 90]))
        driver.engine.set_ready(seq_id, index)


@dataclass(frozen=True)
class Seen:
    """What a step does with pictures, by sequence; and its rows' lengths, without decodes."""

    encoded: list[tuple[int, int]]  # and index
    read: list[tuple[int, int]]
    rows: dict[int, int]


def next_step(driver: Driver) -> Seen:
    assert driver.schedule()
    plan = driver.flights[-1]
    rows = {row.seq_id: len(row.tokens) for row in plan_rows(plan) if row.seq_id < 1000}
    driver.apply()
    return Seen(plan.ahead, [image[:2] for image in plan.images], rows)


def test_beside_a_decode_a_picture_is_encoded_in_one_step_and_read_in_the_next() -> None:
    driver = driver_of()
    decode(driver, 2)
    show(driver, 1)
    assert next_step(driver) == Seen([(1, 0)], [], {})
    assert next_step(driver) == Seen([], [(1, 0)], {1: PICTURE + 2})
    assert all(len(driver.tokens[text]) == 3 for text in (1000, 1001)), "both went on in every step"


def test_only_one_is_encoded_at_a_time() -> None:
    driver = driver_of()
    decode(driver, 2)
    for seq_id in (1, 2, 3):
        show(driver, seq_id)
    steps = [next_step(driver) for _ in range(4)]
    assert [step.encoded for step in steps] == [[(1, 0)], [(2, 0)], [(3, 0)], []]
    assert [step.read for step in steps] == [[], [(1, 0)], [(2, 0)], [(3, 0)]]
    driver.drain()
    assert {1, 2, 3} <= driver.ends.keys()


def test_with_nobody_decoding_all_are_read_at_once() -> None:
    driver = driver_of()
    for seq_id in (1, 2, 3):
        show(driver, seq_id, pictures=2)
    all_pictures = [(seq_id, index) for seq_id in (1, 2, 3) for index in (0, 1)]
    assert next_step(driver) == Seen([], all_pictures, dict.fromkeys((1, 2, 3), 2 * (PICTURE + 1) + 1))


def test_a_prompt_of_several_pictures_goes_on_from_one_to_the_next() -> None:
    driver = driver_of()
    decode(driver, 1)
    show(driver, 1, before=3, pictures=3)
    assert next_step(driver) == Seen([(1, 0)], [], {1: 3})
    assert next_step(driver) == Seen([(1, 1)], [(1, 0)], {1: PICTURE + 1})
    assert next_step(driver) == Seen([(1, 2)], [(1, 1)], {1: PICTURE + 1})
    assert next_step(driver) == Seen([], [(1, 2)], {1: PICTURE + 2})


def test_text_passes_pictures_that_wait_for_their_step() -> None:
    driver = driver_of()
    decode(driver, 1)
    for seq_id in (1, 2, 3):
        show(driver, seq_id)
    driver.add(4, [5, 6], max_tokens=1)
    assert next_step(driver).rows == {4: 2}
    assert 4 in driver.ends


def test_users_take_turns() -> None:
    driver = driver_of()
    decode(driver, 1)
    for seq_id in (1, 2, 3):
        show(driver, seq_id, user="many")
    show(driver, 4, user="one")
    assert [next_step(driver).encoded for _ in range(3)] == [[(1, 0)], [(4, 0)], [(2, 0)]]


def test_a_smaller_priority_is_encoded_first() -> None:
    driver = driver_of()
    decode(driver, 1)
    show(driver, 1, priority=1)
    show(driver, 2, priority=0)
    assert [next_step(driver).encoded for _ in range(2)] == [[(2, 0)], [(1, 0)]]


def test_equal_pictures_are_encoded_together_and_share_their_blocks() -> None:
    """The continuations of one request."""
    driver = driver_of(enable_prefix_caching=True, block_size=2)
    decode(driver, 1)
    for seq_id in (1, 2, 3):
        show(driver, seq_id, image_hashes=[b"h" * 16])
    assert next_step(driver).encoded == [(1, 0), (2, 0), (3, 0)]
    assert next_step(driver).rows == {1: PICTURE + 2, 2: 2, 3: 2}


def test_no_more_are_encoded_than_will_soon_be_read() -> None:
    """With all places taken: the workers would have forgotten them by then."""
    driver = driver_of(max_num_seqs=2)
    decode(driver, 2)
    for seq_id in range(1, 6):
        show(driver, seq_id)
    assert [next_step(driver).encoded for _ in range(4)] == [[(1, 0)], [(2, 0)], [], []]
    show(driver, 7, priority=-1)
    assert next_step(driver).encoded == [(7, 0)]


def test_a_picture_whose_turn_has_not_come_does_not_take_the_place_of_others() -> None:
    """Those before it in its prompt are not in yet."""
    driver = driver_of()
    decode(driver, 1)
    for seq_id in (1, 2, 3):
        assert driver.add(seq_id, [IMAGE, IMAGE, 300], image_positions=[0, 1]) is None
        for index in range(2):
            driver.engine.set_shape(seq_id, index, i32([IMAGE] * PICTURE))
        driver.engine.set_ready(seq_id, 1)
    show(driver, 4)
    assert next_step(driver).encoded == [(4, 0)]
    driver.engine.set_ready(2, 0)
    assert [next_step(driver).encoded for _ in range(2)] == [[(2, 0)], [(2, 1)]]


def test_the_last_token_of_a_reply_holds_nobody_up() -> None:
    """While it is in flight nothing more of it can be planned: nobody would wait."""
    driver = driver_of(async_scheduling=True)
    driver.add(5, 3, max_tokens=1)
    assert driver.schedule()
    show(driver, 1)
    assert driver.schedule()
    assert driver.flights[-1].ahead == []
    assert [image[:2] for image in driver.flights[-1].images] == [(1, 0)]


def test_what_a_step_had_no_room_for_is_encoded_ahead_once_somebody_decodes() -> None:
    driver = driver_of(max_num_batched_tokens=PICTURE + 2)
    show(driver, 1)
    show(driver, 2)
    assert next_step(driver) == Seen([], [(1, 0)], {1: PICTURE + 2})
    assert next_step(driver) == Seen([(2, 0)], [], {1: 1})
    assert next_step(driver).read == [(2, 0)]


def test_in_strict_order_all_is_done_at_once() -> None:
    driver = driver_of(strict_fifo=True)
    decode(driver, 1)
    show(driver, 1)
    assert next_step(driver) == Seen([], [(1, 0)], {1: PICTURE + 2})


def test_a_large_batch_is_kept_full() -> None:
    """Where 32 decode, two pictures a step are needed to follow replies of 16 tokens."""
    driver = driver_of()
    decode(driver, 32)
    for seq_id in (1, 2, 3):
        show(driver, seq_id)
    assert [next_step(driver).encoded for _ in range(2)] == [[(1, 0), (2, 0)], [(3, 0)]]


def test_whole_prompts_are_not_cut() -> None:
    driver = driver_of(enable_chunked_prefill=False)
    decode(driver, 1)
    show(driver, 1, pictures=2)
    assert next_step(driver) == Seen([], [(1, 0), (1, 1)], {1: 2 * (PICTURE + 1) + 1})


def test_new_workers_have_encoded_nothing() -> None:
    driver = driver_of()
    decode(driver, 1)
    show(driver, 1, before=9)
    assert next_step(driver).encoded == [(1, 0)]
    driver.fail_step()
    # The text has made tokens, but must compute what it knows before it decodes again.
    assert next_step(driver) == Seen([], [(1, 0)], {1: 9 + PICTURE + 2})


def test_a_picture_in_the_cache_waits_for_nobody() -> None:
    driver = driver_of(enable_prefix_caching=True, block_size=2)
    seen = {"image_positions": [0], "image_hashes": [b"h" * 16]}
    for seq_id in (1, 2):
        if seq_id == 2:
            decode(driver, 1)
        assert driver.add(seq_id, [IMAGE, 300, 301], max_tokens=1, **seen) is None
        driver.engine.set_shape(seq_id, 0, i32([IMAGE] * PICTURE))
        driver.engine.set_ready(seq_id, 0)
        step = next_step(driver)
        assert step.encoded == []
        assert (step.read, step.rows) == (([(1, 0)], {1: PICTURE + 2}) if seq_id == 1 else ([], {2: 2}))
