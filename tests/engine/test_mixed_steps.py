"""How much of prompts a step has beside those who decode, and wait for it."""

from __future__ import annotations

import pytest

from tests.engine.driver import Driver


@pytest.mark.parametrize(
    ("num_decodes", "mixed", "chunk"), [(0, 6, 12), (1, 6, 5), (3, 6, 3), (5, 6, 3), (5, 0, 7), (1, 20, 11), (3, 1, 1)]
)
def test_what_decodes_leave_to_a_prompt(num_decodes: int, mixed: int, chunk: int) -> None:
    driver = Driver(max_num_batched_tokens=12, max_num_mixed_tokens=mixed)
    for seq_id in range(num_decodes):
        driver.add(seq_id, 1, max_tokens=30)
    if num_decodes:
        driver.step()
    driver.add(10, 30)
    driver.schedule()
    assert driver.row_lengths[-1] == [1] * num_decodes + [chunk]


def test_prompts_share_what_decodes_leave() -> None:
    driver = Driver(max_num_batched_tokens=12, max_num_mixed_tokens=7)
    driver.add(1, 1, max_tokens=30)
    driver.step()
    driver.add(2, 4)
    driver.add(3, 8)
    driver.schedule()
    assert driver.row_lengths[-1] == [1, 4, 2]


@pytest.mark.parametrize("values", [{"enable_chunked_prefill": False}, {"atomic_images": True}])
def test_what_comes_whole_is_not_limited_beside_decodes(values: dict[str, bool]) -> None:
    driver = Driver(max_num_batched_tokens=12, max_num_mixed_tokens=2, **values)
    driver.add(1, 1, max_tokens=30)
    driver.step()
    driver.add(2, 9)
    driver.schedule()
    assert driver.row_lengths[-1] == [1, 9]
