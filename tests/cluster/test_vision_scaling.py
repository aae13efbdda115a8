"""Which vision workers start and go; no process is started here."""

from __future__ import annotations

from airside.cluster.supervisor.vision_scaling import (
    PROVEN_S,
    RESTART_DELAY_MAX_S,
    SHORT_LIFE_DELAY_S,
    Drain,
    Start,
    VisionScaling,
)


def test_the_pool_is_filled_once() -> None:
    scaling = VisionScaling(2, workers_max=4)
    assert scaling.decide(0.0) == [Start(0), Start(1)]
    assert scaling.decide(0.1) == []


def test_the_youngest_go_first_and_are_not_replaced() -> None:
    scaling = VisionScaling(3, workers_max=4)
    scaling.decide(0.0)
    scaling.set_target(1)
    assert scaling.decide(20.0) == [Drain(1), Drain(2)]
    scaling.ended(2, "exit status 0", 21.0)
    scaling.ended(1, "exit status 0", 21.0)
    assert scaling.decide(22.0) == []
    assert scaling.notice == ""


def test_restarts_are_counted_by_why_and_those_that_were_to_go_are_none() -> None:
    scaling = VisionScaling(6, workers_max=6)
    scaling.decide(0.0)
    scaling.joined(0)
    scaling.ended(0, "killed", 1.0)
    scaling.ended(1, "killed, silent", 1.0, has_hung=True)
    scaling.ended(2, "no such file", 1.0)
    scaling.ended(3, "killed", PROVEN_S)
    scaling.set_target(1)
    assert scaling.decide(60.0) == [Drain(5)]
    scaling.ended(5, "killed", 60.0)
    scaling.killed(4)
    assert scaling.restarts == {"died": 2, "hung": 1, "not_started": 1, "with_the_controller": 1}


def test_numbers_are_never_used_twice() -> None:
    scaling = VisionScaling(1, workers_max=4)
    scaling.decide(0.0)
    scaling.set_target(0)
    scaling.decide(1.0)
    scaling.set_target(1)
    assert scaling.decide(2.0) == [Start(1)]  # 0 still drains


def test_one_that_dies_is_replaced_at_once() -> None:
    scaling = VisionScaling(1, workers_max=4)
    scaling.decide(0.0)
    scaling.ended(0, "killed", PROVEN_S)
    assert scaling.decide(PROVEN_S) == [Start(1)]


def test_starts_that_fail_are_tried_again_later_and_later() -> None:
    scaling = VisionScaling(1, workers_max=4)
    now, delays = 0.0, []
    (start,) = scaling.decide(now)
    for _ in range(8):
        assert isinstance(start, Start)
        failed_at = now
        scaling.ended(start.number, "no such file", failed_at)
        while not (steps := scaling.decide(now)):
            now += 1.0
        (start,) = steps
        delays.append(now - failed_at)
    assert delays == sorted(delays)
    assert delays[0] == 2.0
    assert delays[-1] == RESTART_DELAY_MAX_S
    assert "8 vision workers in a row failed to start: no such file" in scaling.notice


def test_whoever_kills_them_once_they_are_up_does_not_make_their_starts_fail() -> None:
    scaling, now = VisionScaling(1, workers_max=2), 0.0
    scaling.decide(now)
    for number in range(20):
        scaling.joined(number)
        now += 1.0
        scaling.ended(number, "killed", now)
        assert scaling.decide(now) == []
        now += SHORT_LIFE_DELAY_S
        assert scaling.decide(now) == [Start(number + 1)]
    assert scaling.failures == 0
    assert scaling.notice == ""


def test_one_that_is_up_ends_the_wait_after_failed_starts() -> None:
    scaling = VisionScaling(2, workers_max=2)
    scaling.decide(0.0)
    for number in (0, 2, 3):
        scaling.ended(number, "no room", 0.0)
        scaling.retry()
        scaling.decide(0.0)
    scaling.ended(4, "no room", 0.0)
    assert scaling.failures == 4
    assert scaling.decide(1.0) == []
    scaling.joined(1)
    assert scaling.failures == 0
    assert scaling.decide(1.0) == [Start(5)]


def test_the_maximum_holds_and_is_named() -> None:
    scaling = VisionScaling(1, workers_max=2)
    scaling.set_target(9)
    assert scaling.decide(0.0) == [Start(0), Start(1)]
    assert scaling.target == 2
    assert scaling.notice == "9 asked for, vision.autoscaling_config.max_replicas is 2"


def test_another_number_does_not_hurry_a_restart_but_asking_for_it_does() -> None:
    scaling = VisionScaling(1, workers_max=2)
    scaling.decide(0.0)
    scaling.ended(0, "killed", 0.0)
    assert scaling.decide(0.5) == []
    scaling.set_target(2)
    assert scaling.decide(0.6) == []
    scaling.retry()
    assert scaling.decide(0.7) == [Start(1), Start(2)]
