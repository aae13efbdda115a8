"""Users take turns by what they have been given; within a user, whoever is due first."""

from __future__ import annotations

import pytest

from tests.engine.driver import Driver


def alone_driver() -> Driver:
    """One sequence at a time, so that the order of admissions is the order of the queue."""
    return Driver(max_num_seqs=1, max_queued_requests=4000, max_queued_tokens=1_000_000)


def add_many(driver: Driver, user: str, seq_ids: range, tokens: int = 8, **values: object) -> None:
    for seq_id in seq_ids:
        assert driver.add(seq_id, tokens, user=user, max_tokens=1, **values) is None


def users_of(driver: Driver) -> str:
    """One letter per admission: sequence ids are in hundreds by user."""
    return "".join("ABCDEFGHI"[seq_id // 100] for seq_id in driver.admitted)


def test_two_users_alternate_however_many_one_asks() -> None:
    driver = alone_driver()
    add_many(driver, "ann", range(8))
    add_many(driver, "bob", range(100, 103))
    driver.drain()
    assert users_of(driver) == "ABABABAAAAA"


def test_shares_are_of_tokens_not_of_requests() -> None:
    driver = alone_driver()
    add_many(driver, "ann", range(4), tokens=12)
    add_many(driver, "bob", range(100, 112), tokens=4)
    driver.drain()
    assert users_of(driver) == "ABBB" * 4


def test_output_is_charged_too() -> None:
    driver = alone_driver()
    for seq_id in range(3):
        driver.add(seq_id, 2, user="ann", max_tokens=20)
    add_many(driver, "bob", range(100, 110), tokens=4)
    driver.drain()
    # 21 tokens are computed for each of hers, 4 for each of his.
    assert users_of(driver) == "ABBBBBBABBBBA"


def test_who_comes_back_has_saved_nothing_up() -> None:
    driver = alone_driver()
    add_many(driver, "bob", range(100, 101))
    driver.drain()
    add_many(driver, "ann", range(20))
    for _ in range(10):
        driver.step()
    driver.admitted.clear()
    add_many(driver, "bob", range(101, 111))
    driver.drain()
    assert users_of(driver)[1:17] in ("AB" * 8, "BA" * 8)


def test_a_stream_of_new_users_does_not_starve_an_old_one() -> None:
    driver = alone_driver()
    driver.add(0, 40, user="old", max_tokens=1)
    driver.add(1, 8, user="old", max_tokens=1)
    for number in range(60):
        driver.add(100 + number, 8, user=f"new {number}", max_tokens=1)
        if number >= 4:  # as many come as are served, so that somebody new always waits
            driver.step()
    assert 5 < driver.admitted.index(1) < 40


def test_within_a_user_the_first_due_comes_first() -> None:
    driver = alone_driver()
    driver.now = 100.0
    driver.add(1, 4, arrival=100.0, max_tokens=1)
    driver.add(2, 4, arrival=99.0, max_tokens=1)
    driver.add(3, 4, arrival=100.0, deadline=130.0, max_tokens=1)
    driver.add(4, 4, arrival=100.0, deadline=500.0, max_tokens=1)
    driver.add(5, 4, arrival=45.0, max_tokens=1)  # waits for 55 s: due before any of them
    driver.drain()
    assert driver.admitted == [5, 3, 2, 1, 4]


@pytest.mark.parametrize("priority", [-1, 1])
def test_priority_comes_before_shares(priority: int) -> None:
    driver = alone_driver()
    add_many(driver, "ann", range(3), priority=priority)
    add_many(driver, "bob", range(100, 103))
    driver.drain()
    assert users_of(driver) == ("AAABBB" if priority < 0 else "BBBAAA")


def test_what_has_run_comes_before_what_has_not() -> None:
    """A preempted sequence keeps its turn, though its user has been given more since."""
    driver = Driver(num_blocks=5, block_size=2, max_model_len=10)
    driver.add(1, 3, user="ann", max_tokens=7)
    driver.add(2, 3, user="ann", max_tokens=5)
    driver.step()
    driver.add(3, 3, user="bob", max_tokens=1)
    driver.drain()
    assert driver.ends[2].preemptions > 0
    assert list(driver.ends) == [1, 2, 3]


def test_the_place_in_the_queue_is_exact_for_one_user_and_fair_for_two() -> None:
    driver = alone_driver()
    add_many(driver, "ann", range(100))
    assert [driver.engine.queue_position(seq_id) for seq_id in (0, 50, 99)] == [0, 50, 99]
    add_many(driver, "bob", range(100, 102))
    assert driver.engine.queue_position(100) in (0, 1)
    assert driver.engine.queue_position(101) in (2, 3)
    assert driver.engine.queue_position(99) == 101


def test_many_users_who_came_once_cost_nothing_later() -> None:
    driver = alone_driver()
    for number in range(1500):
        driver.add(1000 + number, 2, user=f"once {number}", max_tokens=1)
    driver.drain()
    driver.admitted.clear()
    add_many(driver, "ann", range(2))
    add_many(driver, "bob", range(100, 102))
    driver.drain()
    assert users_of(driver) == "ABAB"
