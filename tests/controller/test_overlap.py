"""Two steps in flight: one is planned while the one before it is computed, and both are lost together."""

from __future__ import annotations

import time

import pytest

from airside.proto import messages as msg
from tests.controller.conftest import Bus
from tests.controller.scripted import IMAGE_TOKEN, Gateway, Rank, read_i32

TOKENS = [1000, 1001, 1002, 1003, 1004]


def serving(bus: Bus, **changes: object) -> tuple[Gateway, Rank]:
    bus.start(async_scheduling=True, **changes)
    gateway, rank = bus.gateway(), bus.rank()
    gateway.wait_ready()
    return gateway, rank


def test_a_step_is_planned_before_the_one_before_it_is_answered(bus: Bus) -> None:
    gateway, rank = serving(bus)
    gateway.add(1, (1, 2, 3), max_tokens=3)
    first, second = rank.plan(), rank.plan()
    assert second.step_id == first.step_id + 1
    assert (read_i32(first.token_ids), read_i32(second.token_ids)) == ([1, 2, 3], [-1])
    assert not rank.heard(msg.StepPlan)  # two are enough
    rank.answer(first)
    third = rank.plan()
    assert read_i32(third.token_ids) == [-1]
    rank.answer(second)
    rank.answer(third)
    tokens, end = gateway.finish(1)
    assert (tokens, end.reason) == (TOKENS[:3], "length")
    assert not rank.heard(msg.StepPlan)  # what ends by its length is not planned beyond it


def test_a_result_that_passes_an_older_one_fails_the_group(bus: Bus) -> None:
    gateway, rank = serving(bus)
    gateway.add(1, (1, 2, 3), max_tokens=5)
    first, second = rank.plan(), rank.plan()
    rank.answer(second)
    assert f"before that of step {first.step_id}" in rank.expect(msg.Shutdown).why


@pytest.mark.parametrize("num_answered", [0, 1, 2])
def test_ranks_lost_with_two_steps_in_flight_cost_no_token(bus: Bus, num_answered: int) -> None:
    gateway, rank = serving(bus)
    gateway.add(1, (1, 2, 3), max_tokens=5)
    gateway.add(2, (4, 5, 6), max_tokens=5)
    gateway.accepted(2)
    lost = [rank.plan(), rank.plan()]
    for _ in range(num_answered):
        rank.answer(lost.pop(0))
        lost.append(rank.plan())
    rank.send(msg.WorkerFailed(0, "the device is gone"))
    gateway.expect(msg.EngineState, lambda s: s.state == "recovering")
    rank = bus.rank("worker-0-again", group=1)
    for plan in lost:
        rank.answer(plan)  # of the launch before: ignored
    first = rank.plan()
    assert first.step_id > lost[-1].step_id
    assert min(read_i32(first.token_ids)) >= 0, "it refers to a step that is lost"
    rank.answer(first)
    rank.step_until_end(gateway, 1, 2)
    assert gateway.finish(1)[0] == TOKENS
    assert gateway.finish(2)[0] == TOKENS


def test_the_time_of_a_step_counts_from_when_it_is_the_oldest(bus: Bus) -> None:
    gateway, rank = serving(bus, step_timeout_s=2.0)
    gateway.add(1, (1, 2, 3), max_tokens=2)
    first, second = rank.plan(), rank.plan()
    for plan in (first, second):  # the second is sent at once, and answered after more than the timeout
        time.sleep(1.4)
        rank.answer(plan)
    assert gateway.finish(1)[0] == TOKENS[:2]
    assert gateway.peers()["worker-0"].state == "ready"


def test_a_picture_that_the_second_step_reads_is_kept_until_that_is_over(bus: Bus) -> None:
    gateway, rank = serving(bus, max_num_batched_tokens=2)
    vision = bus.vision_worker("vision-0")
    gateway.add(1, (IMAGE_TOKEN, 1, 2), b"picture")
    vision.pixels(vision.job(), slab=32)
    first, second = rank.plan(), rank.plan()
    assert first.images
    assert second.images
    gateway.send(msg.AbortSequence(1, "cancelled"))
    gateway.finish(1)
    rank.answer(first)
    assert not vision.heard(msg.Release)
    rank.answer(second)
    assert vision.expect(msg.Release).slab == 32
