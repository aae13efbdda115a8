"""Pictures that take fewer rope positions than tokens, and what that means for the prefix cache."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.columns import IMAGE, i32, ints, plan_rows
from tests.engine.driver import Driver

HASH, OTHER = b"a" * 16, b"b" * 16


def see(driver: Driver, seq_id: int, **shape: Any) -> int:  # Any: arguments of set_shape
    """A request with one picture of 7 tokens, run to its end: how many of its tokens were in the cache."""
    hashes = [shape.pop("request_hash", b"")]
    driver.add(seq_id, [20, IMAGE, 21, 22, 23], image_positions=[1], image_hashes=hashes, max_tokens=3)
    expansion = shape.pop("expansion", [IMAGE] * 7)
    assert driver.engine.set_shape(seq_id, 0, i32(expansion), **shape)
    assert driver.engine.set_ready(seq_id, 0)
    driver.drain()
    return driver.ends[seq_id].cached_tokens


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 64])
def test_a_row_is_behind_by_the_pictures_before_it(chunk: int) -> None:
    """Tokens 1 to 7 are a picture of 3 positions, 9 and 10 one of 1: rows in a picture do not count it yet."""
    driver = Driver(max_num_batched_tokens=chunk, async_scheduling=True)
    driver.add(1, [20, IMAGE, 21, IMAGE, 22], image_positions=[1, 3], max_tokens=3)
    driver.engine.set_shape(1, 0, i32([8, *[IMAGE] * 5, 9]), rope_advance=3)
    driver.engine.set_shape(1, 1, i32([IMAGE, IMAGE]), rope_advance=1)
    for index in (0, 1):
        driver.engine.set_ready(1, index)
    begins: set[int] = set()
    while True:
        while driver.schedule():
            (row,) = plan_rows(driver.flights[-1])
            assert row.position_shift == (0 if row.begin < 8 else 4 if row.begin < 11 else 5)
            begins.add(row.begin)
        if not driver.flights:
            break
        driver.apply()
    assert max(begins) == 13


def test_the_column_is_left_empty_without_shifts_and_has_all_rows_with_one() -> None:
    driver = Driver()
    driver.add(1, [20, 21], max_tokens=9)
    driver.add(2, [20, IMAGE], image_positions=[1], max_tokens=9)
    driver.engine.set_shape(2, 0, i32([IMAGE] * 4), rope_advance=2)
    driver.engine.set_ready(2, 0)
    driver.schedule()
    assert driver.flights[0].position_shifts == b""
    driver.apply()
    driver.add(3, [20, 21], max_tokens=9)
    driver.schedule()
    assert sorted(ints(driver.flights[0].position_shifts)) == [0, 0, 2]


def test_positions_are_the_same_after_a_preemption() -> None:
    driver = Driver()
    driver.add(1, [20, IMAGE, 21], image_positions=[1], max_tokens=4)
    driver.engine.set_shape(1, 0, i32([IMAGE] * 6), rope_advance=2)
    driver.engine.set_ready(1, 0)
    driver.step()
    driver.fail_step()
    driver.schedule()
    (row,) = plan_rows(driver.flights[0])
    assert (row.begin, row.position_shift) == (0, 0)
    driver.apply()
    driver.schedule()
    (row,) = plan_rows(driver.flights[0])
    assert row.position_shift == 4


@pytest.mark.parametrize(
    "shape",
    [
        {"rope_advance": 2, "request_hash": HASH},
        {"rope_advance": 2, "content_hash": HASH},
        {"rope_advance": 2, "content_hash": HASH, "request_hash": OTHER},
    ],
)
def test_a_hash_may_come_with_the_shape(shape: dict[str, Any]) -> None:
    """And takes the place of the request's. A hit of two blocks ends in the middle of the picture."""
    driver = Driver(enable_prefix_caching=True)
    assert see(driver, 1, rope_advance=2, request_hash=HASH) == 0
    assert see(driver, 2, **shape) == 8


@pytest.mark.parametrize(
    "shape",
    [
        {"rope_advance": 3},
        {},
        {"rope_advance": 2, "expansion": [IMAGE] * 6},
        {"rope_advance": 2, "content_hash": OTHER},
    ],
)
def test_pictures_of_other_positions_share_nothing(shape: dict[str, Any]) -> None:
    driver = Driver(enable_prefix_caching=True, block_size=2)
    assert see(driver, 1, rope_advance=2, content_hash=HASH) == 0
    assert see(driver, 2, **{"content_hash": HASH, **shape}) == 0


def test_pictures_whose_hash_never_comes_share_nothing() -> None:
    driver = Driver(enable_prefix_caching=True)
    assert [see(driver, seq_id, rope_advance=2) for seq_id in (1, 2)] == [0, 0]


@pytest.mark.parametrize(
    ("expansion", "shape", "wrong"),
    [
        ([IMAGE] * 3, {"rope_advance": -1}, r"rope_advance is -1, but must be in \[1, 3\]"),
        ([IMAGE] * 3, {"rope_advance": 4}, r"rope_advance is 4, but must be in \[1, 3\]"),
        ([8, 8], {"rope_advance": 1}, "none of which is the image token"),
        ([IMAGE], {"content_hash": b"short"}, "an image hash has 5 bytes, but must have 16"),
    ],
)
def test_nonsense_is_refused(expansion: list[int], shape: dict[str, Any], wrong: str) -> None:
    driver = Driver()
    driver.add(1, [IMAGE], image_positions=[0])
    with pytest.raises(ValueError, match=wrong):
        driver.engine.set_shape(1, 0, i32(expansion), **shape)
    assert driver.engine.set_shape(1, 0, i32([8, 8]), rope_advance=2)
