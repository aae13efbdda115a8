"""When the supervisor is told the load, and what an empty vision pool can do; with a stand-in for the ledger."""

from __future__ import annotations

from typing import cast

import pytest

from airside.controller.supervisor_desk import SupervisorDesk
from airside.controller.vision.ledger import VisionLedger
from airside.proto.messages import ScaleVision, VisionLoad, VisionPool, VisionTarget
from tests.controller.scripted import controller_settings


class StandInLedger:
    """Says what the test has set."""

    def __init__(self) -> None:
        self.queued, self.in_hand, self.num_workers = 0, 0, 1
        self.done: dict[str, int] = {}
        self.asked = 0

    def load(self, _now: float) -> VisionLoad:
        self.asked += 1
        return VisionLoad(self.queued, self.in_hand, self.num_workers, 0.25)

    def jobs_done(self) -> dict[str, int]:
        return dict(self.done)


@pytest.fixture
def ledger() -> StandInLedger:
    return StandInLedger()


@pytest.fixture
def desk(ledger: StandInLedger) -> SupervisorDesk:
    made = SupervisorDesk(controller_settings("ipc:///nowhere"), cast(VisionLedger, ledger))
    made.join("supervisor", [])
    return made


def told_at(desk: SupervisorDesk, times: list[float]) -> list[float]:
    return [now for now in times if desk.take_load(now) is not None]


def test_twice_a_second(desk: SupervisorDesk, ledger: StandInLedger) -> None:
    ledger.queued = 7
    assert told_at(desk, [step / 10 for step in range(100, 120)]) == [10.0, 10.5, 11.0, 11.5]
    assert ledger.asked == 4


def test_a_loop_that_turns_each_half_second_tells_in_each_turn(desk: SupervisorDesk) -> None:
    assert told_at(desk, [10.0, 10.5, 10.99, 11.5]) == [10.0, 10.5, 10.99, 11.5]


def test_at_once_when_something_waits_and_nobody_works(desk: SupervisorDesk, ledger: StandInLedger) -> None:
    ledger.num_workers = 0
    assert told_at(desk, [10.0, 10.1]) == [10.0]
    ledger.queued = 1
    assert desk.take_load(10.11) == VisionLoad(1, 0, 0, 0.25)
    assert told_at(desk, [10.12, 10.2, 10.5, 10.6]) == [10.6]  # once, and then as ever
    ledger.queued = 0
    assert told_at(desk, [10.7, 11.1]) == [11.1]
    ledger.queued = 1
    assert told_at(desk, [11.2]) == [11.2]


def test_pictures_that_came_and_went_meanwhile(desk: SupervisorDesk, ledger: StandInLedger) -> None:
    ledger.done = {"vision-0": 4, "vision-1": 9}
    assert desk.take_load(10.0) == VisionLoad(0, 0, 1, 0.25, done=13)
    ledger.done = {"vision-0": 6}  # the other is gone
    assert desk.take_load(11.0) == VisionLoad(0, 0, 1, 0.25, done=2)
    assert desk.take_load(12.0) == VisionLoad(0, 0, 1, 0.25, done=0)


def test_nobody_is_told_without_a_supervisor_or_for_a_text_model(desk: SupervisorDesk, ledger: StandInLedger) -> None:
    desk.leave()
    assert desk.take_load(10.0) is None
    desk.join("supervisor", [])
    assert desk.take_load(10.0) is not None
    desk.join("supervisor", [])  # it has forgotten
    assert desk.take_load(10.1) is not None
    text = SupervisorDesk(controller_settings("ipc:///nowhere", image_token_id=None), cast(VisionLedger, ledger))
    text.join("supervisor", [])
    assert text.take_load(10.0) is None


def test_a_supervisor_is_told_again_what_was_asked_for(desk: SupervisorDesk) -> None:
    assert desk.join("supervisor", []) == []
    outcome, target = desk.scale(ScaleVision(1, 1, 3))
    assert (outcome.refused, target) == ("", VisionTarget(1, 3))
    assert desk.scale(ScaleVision(2, 5))[1] is None
    assert desk.join("supervisor", []) == [VisionTarget(1, 3)]


def test_the_target_is_said_at_once_and_is_then_the_supervisors(desk: SupervisorDesk) -> None:
    desk.note_pool(VisionPool(3, "", 1, 4, {"up_load": 2}, {"died": 1}))
    assert desk.vision_restarts == {"died": 1}
    assert (desk.vision_target, desk.vision_scale_events) == (3, {"up_load": 2})
    desk.scale(ScaleVision(1, 0, 2))
    assert desk.vision_target == 2
    desk.scale(ScaleVision(2, 4))
    assert desk.vision_target == 4
    desk.note_pool(VisionPool(2, "no CPU is free"))
    assert (desk.vision_target, desk.vision_pending) == (2, "no CPU is free")


@pytest.mark.parametrize(
    ("pool", "ready"),
    [
        (VisionPool(0, "", fewest=0, most=3), True),
        (VisionPool(1, "", fewest=0, most=3), True),  # it is starting
        (VisionPool(1, "1 pending: no CPU is free", fewest=0, most=3), False),
        (VisionPool(0, "", fewest=0, most=0), False),
        (VisionPool(1, "", fewest=1, most=3), False),
    ],
)
def test_what_an_empty_pool_can_do(desk: SupervisorDesk, ledger: StandInLedger, pool: VisionPool, ready: bool) -> None:
    desk.note_pool(pool)
    assert desk.vision_ready
    ledger.num_workers = 0
    assert desk.vision_ready is ready
    desk.leave()
    assert not desk.vision_ready
