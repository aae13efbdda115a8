"""The controller's small parts by themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from airside.controller import live_requests, peers, step_clock
from airside.controller.live_requests import LiveRequest, LiveRequests
from airside.controller.peers import Peers, Role
from airside.controller.step_clock import PHASES, WINDOW_STEPS, StepClock
from airside.controller.vision.segments import unlink_segment


def joined(*names: str) -> Peers:
    found = Peers()
    for name in names:
        found.join(Role.VISION_WORKER, name, "local", 1, now=0.0)
    return found


def live(seq_id: int, name: str = "", client: int = 0, arrival: float = 5.0) -> LiveRequest:
    return LiveRequest(seq_id, name or f"r{seq_id}", client, arrival)


def test_silence_is_counted_from_the_last_sign_of_life_or_excuse() -> None:
    bus = joined("a", "b", "c")
    bus.heard("b", 9.0)
    assert bus.silent(10.0, 5.0, excused={"c"}) == ["a"]
    assert bus.silent(14.0, 5.0, excused=()) == ["a"]
    assert bus.silent(16.0, 5.0, excused=()) == ["a", "b", "c"]


def test_lost_is_final_until_a_new_hello() -> None:
    bus = joined("a")
    assert bus.lose("a") is not None
    assert bus.lose("a") is None
    assert not bus.heard("a", 1.0)
    assert bus.silent(100.0, 5.0, excused=()) == []
    assert [row.state for row in bus.rows(2.0, {"a": "busy"}, {})] == ["lost"]
    bus.join(Role.VISION_WORKER, "a", "local", 2, now=3.0)
    assert bus.heard("a", 4.0)


def test_lost_peers_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "LOST_PEERS_MAX", 2)
    bus = joined("a", "b", "c", "d")
    for name in "abc":
        bus.lose(name)
    assert [row.name for row in bus.rows(0.0, {}, {})] == ["b", "c", "d"]


def test_deadlines_come_in_order_and_only_for_live_sequences() -> None:
    requests = LiveRequests()
    for seq_id, deadline in ((1, 30.0), (2, 10.0), (3, None), (4, 20.0)):
        requests.add(live(seq_id), deadline)
    assert requests.next_deadline() == 10.0
    requests.end(2)
    assert requests.next_deadline() == 20.0
    assert requests.pop_expired(25.0) == [4]
    assert requests.pop_expired(25.0) == []


def test_far_deadlines_of_ended_sequences_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_requests, "DEADLINES_IDLE_MAX", 10)
    requests = LiveRequests()
    requests.add(live(0), 1e9)
    for seq_id in range(1, 100):
        requests.add(live(seq_id), 1e8)
        requests.end(seq_id)
    assert len(requests._deadlines) <= 15
    assert requests.pop_expired(2e9) == [0]


def test_ended_request_ids_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_requests, "ENDED_IDS_MAX", 2)
    requests = LiveRequests()
    for seq_id in range(3):
        requests.add(live(seq_id), None)
        requests.end(seq_id)
    assert [requests.has_ended(f"r{seq_id}") for seq_id in range(3)] == [False, True, True]


@pytest.mark.parametrize("name", ["../airside-x", "airside-/../x", "other"])
def test_only_segments_of_ours_are_unlinked(tmp_path: Path, name: str) -> None:
    (tmp_path / "other").touch()
    assert not unlink_segment(name, tmp_path)
    assert (tmp_path / "other").exists()


def test_a_segment_is_unlinked_once(tmp_path: Path) -> None:
    (tmp_path / "airside-run-v0").touch()
    assert unlink_segment("airside-run-v0", tmp_path)
    assert not unlink_segment("airside-run-v0", tmp_path)


def test_continuations_of_one_call_share_its_id_and_other_calls_do_not() -> None:
    requests = LiveRequests()
    requests.add(live(1, "mine"), None)
    assert requests.may_share("mine", client=0, arrival=5.0)
    assert not requests.may_share("mine", client=1, arrival=5.0)
    assert not requests.may_share("mine", client=0, arrival=6.0)
    requests.add(live(2, "mine"), None)
    assert requests.of_name("mine") == [1, 2]
    requests.end(1)
    assert (requests.of_name("mine"), requests.has_ended("mine")) == ([2], False)
    requests.end(2)
    assert (requests.of_name("mine"), requests.has_ended("mine")) == ([], True)
    assert requests.may_share("mine", client=1, arrival=6.0)


def test_the_step_clock_adds_pieces_and_keeps_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(1_000_000))
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: float(next(now)))
    clock = StepClock()
    assert (clock.median_s, clock.medians_s()) == (0.0, {})
    for phases in [*[PHASES] * WINDOW_STEPS, *[("schedule", "schedule", "send", "apply")] * (WINDOW_STEPS // 2 + 1)]:
        clock.start()
        for phase in phases:
            clock.lap(phase)
        clock.end_step()
    assert clock.medians_s() == {"schedule": 2.0, "build": 0.0, "send": 1.0, "apply": 1.0, "reply": 0.0}
    assert clock.median_s == 3.0  # what it takes to send is told apart
