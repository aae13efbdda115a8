"""Processes that are there and do nothing, and the supervisor, who is asked to end them."""

from __future__ import annotations

import time

import pytest

from airside.proto import messages as msg
from tests.controller.conftest import Bus
from tests.controller.scripted import IMAGE_TOKEN, PATIENCE_S, Peer, Rank, read_i32
from tests.real_processes import wait_until


def keep_alive(*peers: Peer, until: Peer, hears: type[msg.Message]) -> msg.Message:
    """Heartbeats of some, all the while that another has not heard a message of this kind."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        for peer in peers:
            peer.send(msg.Heartbeat(1))
        envelope = until.link.receive(100)
        if envelope is not None and isinstance(envelope.message, hears):
            return envelope.message
    raise AssertionError(f"{until.name} waited for {hears.__name__} in vain")


def test_a_silent_vision_worker_is_reported_once(bus: Bus) -> None:
    bus.start(silence_timeout_s=1.0)
    gateway, supervisor, vision = bus.gateway(), bus.supervisor(), bus.vision_worker("vision-0")
    stuck = keep_alive(gateway, supervisor, until=supervisor, hears=msg.PeerStuck)
    assert stuck == msg.PeerStuck("vision-0", vision.pid, "silent for 1 s")
    assert not supervisor.heard(msg.PeerStuck)
    vision.send(msg.Heartbeat(1))  # it wakes up before it is ended
    vision.expect(msg.Shutdown)


def test_a_silent_rank_is_reported_and_its_group_fails(bus: Bus) -> None:
    bus.start(silence_timeout_s=1.0)
    gateway, supervisor, rank = bus.gateway(), bus.supervisor(), bus.rank()
    gateway.wait_ready()
    stuck = keep_alive(gateway, supervisor, until=supervisor, hears=msg.PeerStuck)
    assert stuck == msg.PeerStuck("worker-0", rank.pid, "silent for 1 s")
    assert gateway.expect(msg.EngineState, lambda s: s.state == "recovering").detail == (
        "rank 0 was lost: silent for 1 s"
    )


def test_a_step_that_hangs_fails_the_group_reports_all_ranks_and_costs_no_token(bus: Bus) -> None:
    bus.start(tensor_parallel_size=2, step_timeout_s=0.5)
    gateway, supervisor = bus.gateway(), bus.supervisor()
    ranks = [bus.peer(Rank, f"worker-{number}") for number in range(2)]
    for number, rank in enumerate(ranks):
        rank.hello(rank=number, world_size=2)
    gateway.wait_ready()
    gateway.add(1, (1, 2, 3), max_tokens=3)
    ranks[0].step()
    late = ranks[0].plan()
    for rank in ranks:
        rank.send(msg.Heartbeat(1))  # a sign of life is no progress
    reported = [supervisor.expect(msg.PeerStuck) for _ in ranks]
    assert {(stuck.name, stuck.pid) for stuck in reported} == {(rank.name, rank.pid) for rank in ranks}
    assert all("engine.step_timeout_s" in stuck.why for stuck in reported)
    assert "a step took more than 0.5 s" in gateway.expect(msg.EngineState, lambda s: s.state == "recovering").detail
    ranks[0].answer(late)  # too late
    for number in range(2):
        bus.peer(Rank, f"again-{number}").hello(rank=number, world_size=2, group=1)
    gateway.wait_ready()


def test_the_next_group_goes_on_after_a_step_that_hung(bus: Bus) -> None:
    bus.start(step_timeout_s=0.5)
    gateway, rank = bus.gateway(), bus.rank()
    gateway.wait_ready()
    gateway.add(1, (1, 2, 3), max_tokens=3)
    rank.step()
    rank.plan()
    gateway.expect(msg.EngineState, lambda s: s.state == "recovering")
    rank = bus.rank("worker-0-again", group=1)
    plan = rank.plan()
    assert read_i32(plan.token_ids) == [1, 2, 3, 1000]
    rank.answer(plan)
    rank.step()
    assert gateway.finish(1)[0] == [1000, 1001, 1002]


def test_ranks_that_load_are_in_no_step(bus: Bus) -> None:
    bus.start(tensor_parallel_size=2, step_timeout_s=0.1)
    gateway, supervisor = bus.gateway(), bus.supervisor()
    bus.peer(Rank, "worker-0").hello(rank=0, world_size=2)
    gateway.await_peer("worker-0", "starting")
    time.sleep(1.2)  # two looks at what is stuck
    assert not supervisor.heard(msg.PeerStuck)
    assert gateway.peers()["worker-0"].state == "starting"


def test_a_supervisor_that_comes_late_is_told_who_got_stuck(bus: Bus) -> None:
    bus.start(silence_timeout_s=1.0)
    gateway, vision = bus.gateway(), bus.vision_worker("vision-0")
    gateway.await_peer("vision-0", "lost")
    supervisor = bus.supervisor()
    assert supervisor.expect(msg.PeerStuck).pid == vision.pid
    bus.vision_worker("vision-0", credits=0)  # a new process of that name: forgotten
    gateway.await_peer("vision-0", "ready")
    assert not bus.supervisor("supervisor-1").heard(msg.PeerStuck)


def test_words_without_the_right_to_say_them_change_nothing(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    bus.start(vision_target=1)
    gateway, rank, vision = bus.gateway(), bus.rank(), bus.vision_worker("vision-0", credits=0)
    gateway.wait_ready(vision=True)
    gateway.add(1, (1, 2, 3), max_tokens=1)
    plan = rank.plan()
    stranger, impostor = bus.peer(Peer, "nobody"), bus.peer(Peer, "controller")
    spoken: list[msg.Message] = [
        msg.Goodbye(),
        msg.Credit(1),
        msg.Fetched(1, 0, 1, b"", 0.5),
        msg.Shape(1, 0, 1, b""),
        msg.ImageFailed(1, 0, 1, "truncated", "no"),
        msg.ArenaFull(64),
        msg.AbortSequence(1, "no"),
        msg.ScaleVision(1, 0),
        msg.StopSequence(1, 0, "no"),
        msg.GrammarReady(1),
        msg.GrammarFailed(1, "no"),
        msg.PeerLost("controller", "no"),
        msg.PeerLost("worker-0", "no"),
        msg.VisionPool(3, "no"),
        msg.DrainVision("vision-0"),
        msg.Shutdown("no"),
        msg.StepResult(plan.step_id, b"\0\0\0\0", 0.0),
    ]
    roles: dict[Peer, tuple[type[msg.Message], ...]] = {
        stranger: (),
        impostor: (),
        vision: (msg.Goodbye, msg.Credit, msg.Fetched, msg.Shape, msg.ImageFailed, msg.ArenaFull),
        rank: (msg.StepResult, msg.GrammarReady, msg.GrammarFailed),
        gateway: (msg.AbortSequence, msg.ScaleVision, msg.StopSequence),
    }
    refused = 0
    for peer, own in roles.items():
        for message in spoken:
            if not isinstance(message, own):
                peer.send(message)
                refused += 1
    crooked = bus.peer(Peer, "gateway-9\nINFO all is well")
    for peer in (impostor, crooked):
        peer.send(msg.GatewayHello("local", 1))
    for peer in (stranger, vision, rank):
        peer.heard(msg.Shutdown)
    wait_until(lambda: sum(gateway.gauges().bus_messages_refused.values()) >= refused + 2, PATIENCE_S, "all refused")
    assert sum(gateway.gauges().bus_messages_refused.values()) == refused + 2
    rows = gateway.peers()
    assert {name: row.state for name, row in rows.items()} == {
        "controller": "ready",
        "gateway-0": "ready",
        "worker-0": "busy",
        "vision-0": "ready",
    }
    assert rows["controller"].role == "controller"
    assert "kind=GatewayHello peer='gateway-9\\nINFO all is well'" in caplog.text
    assert "\nINFO all is well" not in caplog.text
    rank.answer(plan)
    assert gateway.finish(1)[0] == [1000]


def test_the_supervisor_cannot_lose_the_controller_itself(bus: Bus) -> None:
    bus.start()
    gateway, supervisor = bus.gateway(), bus.supervisor()
    supervisor.send(msg.PeerLost("controller", "it seems"))
    supervisor.heard(msg.Shutdown)
    assert gateway.peers()["controller"].state == "ready"


def test_a_token_that_the_model_does_not_know_reaches_no_rank(bus: Bus) -> None:
    bus.start(vocab_size=2000)
    gateway, rank = bus.gateway(), bus.rank()
    vision = bus.vision_worker("vision-0")
    gateway.wait_ready(vision=True)
    for seq_id, prompt, stops in ((1, (1, 2000), []), (2, (-1,), []), (3, (1,), [7, 2000])):
        gateway.add(seq_id, prompt, stop_token_ids=stops)
        rejected = gateway.expect(msg.Rejected)
        assert rejected.code == "invalid"
        assert "[0, 2000)" in rejected.detail
    gateway.add(4, (IMAGE_TOKEN,), b"picture")
    vision.send(msg.Shape(4, 0, vision.probe().epoch, (2000).to_bytes(4, "little")))
    assert "expansion[0] is 2000" in gateway.finish(4)[1].detail
    gateway.add(5, (1999,), max_tokens=1)
    assert read_i32(rank.step().token_ids) == [1999]
    assert gateway.finish(5)[0] == [1000]
