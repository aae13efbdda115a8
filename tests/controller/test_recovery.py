"""Model workers that fail: the engine outlives them, and every sequence goes on with the same tokens."""

from __future__ import annotations

import time

import pytest

from airside.proto import messages as msg
from tests.controller.conftest import Bus
from tests.controller.scripted import Rank, i32, read_i32


def lose_by_supervisor(bus: Bus, rank: Rank) -> None:
    bus.supervisor().send(msg.PeerLost(rank.name, "exit code -9"))


def lose_by_its_word(_bus: Bus, rank: Rank) -> None:
    rank.send(msg.WorkerFailed(0, "out of memory"))


@pytest.mark.parametrize("lose", [lose_by_supervisor, lose_by_its_word])
def test_a_rank_lost_in_mid_step_costs_no_token(bus: Bus, lose: object) -> None:
    assert callable(lose)
    bus.start()
    gateway, rank = bus.gateway(), bus.rank("worker-0")
    gateway.wait_ready()
    gateway.add(1, (1, 2, 3), max_tokens=5)
    rank.step()
    rank.step()
    lost_plan = rank.plan()
    lose(bus, rank)
    state = gateway.expect(msg.EngineState, lambda s: s.state == "recovering")
    assert "rank 0" in state.detail
    gateway.add(2)
    assert gateway.expect(msg.Rejected).code == "unavailable"

    rank = bus.rank("worker-0-again", group=1, num_blocks=80)
    gateway.wait_ready()
    plan = rank.plan()
    assert plan.step_id > lost_plan.step_id
    assert read_i32(plan.token_ids) == [1, 2, 3, 1000, 1001]
    rank.answer(lost_plan)  # a step of the group before: ignored
    rank.answer(plan)
    rank.step()
    rank.step()
    tokens, end = gateway.finish(1)
    assert (tokens, end.reason) == ([1000, 1001, 1002, 1003, 1004], "length")


def test_all_ranks_get_the_least_number_of_blocks_and_every_plan(bus: Bus) -> None:
    bus.start(tensor_parallel_size=2)
    gateway = bus.gateway()
    first, second = bus.peer(Rank, "worker-0"), bus.peer(Rank, "worker-1")
    first.hello(rank=0, world_size=2, num_blocks=50)
    assert gateway.gauges().gauges.get("kv_blocks_total") is None
    second.hello(rank=1, world_size=2, num_blocks=40)
    assert (first.set_up().num_blocks, second.set_up().num_blocks) == (40, 40)
    gateway.wait_ready()
    gateway.add(1, max_tokens=1)
    plan = second.plan()
    assert first.plan() == plan
    second.send(msg.StepResult(plan.step_id, i32(66), 0.0))  # only rank 0 speaks for the group
    first.answer(plan)
    assert gateway.finish(1)[0] == [1000]


def test_ranks_of_a_group_that_is_over_are_told_to_go(bus: Bus) -> None:
    bus.start(tensor_parallel_size=2)
    gateway = bus.gateway()
    ranks = [bus.peer(Rank, f"worker-0-{rank}") for rank in range(2)]
    for number, rank in enumerate(ranks):
        rank.hello(rank=number, world_size=2)
    gateway.wait_ready()
    ranks[1].send(msg.WorkerFailed(1, "the device is gone"))
    ranks[0].expect(msg.Shutdown)
    ranks[0].send(msg.WorkerFailed(0, "rank 1 closed the connection"))  # a consequence, and not the cause
    ranks[0].hello(rank=0, world_size=2, group=0)
    ranks[0].expect(msg.Shutdown)
    gateway.send(msg.GatewayHello("local", gateway.pid))
    gateway.send(msg.GaugesQuery(1))
    gateway.expect(msg.Gauges)
    assert gateway.kept(msg.EngineState)[-1].detail == "rank 1 failed: the device is gone"
    for number in range(2):
        bus.peer(Rank, f"worker-1-{number}").hello(rank=number, world_size=2, group=1)
    gateway.wait_ready()


def test_a_new_launch_takes_over_from_one_that_died_unseen(bus: Bus) -> None:
    bus.start()
    gateway, old = bus.gateway(), bus.rank("worker-0")
    gateway.wait_ready()
    gateway.add(1, max_tokens=2)
    old.step()
    old.plan()
    new = bus.rank("worker-1", group=1)
    new.step()
    assert gateway.finish(1)[0] == [1000, 1001]
    old.send(msg.Heartbeat(1))
    old.expect(msg.Shutdown)


def test_a_group_with_too_few_blocks_is_refused(bus: Bus) -> None:
    bus.start()
    gateway, rank = bus.gateway(), bus.rank("worker-0", num_blocks=20)
    gateway.wait_ready()
    rank.send(msg.WorkerFailed(0, "gone"))
    gateway.expect(msg.EngineState, lambda s: s.state == "recovering")
    small = bus.peer(Rank, "worker-1")
    small.hello(group=1, num_blocks=19)
    assert "20 KV blocks" in small.expect(msg.Shutdown).why
    big = bus.rank("worker-2", group=2, num_blocks=21)
    gateway.add(1, max_tokens=1)
    big.step()
    assert gateway.finish(1)[0] == [1000]


def test_state_slots_are_the_least_of_all_ranks_and_never_fewer_later(bus: Bus) -> None:
    bus.start(tensor_parallel_size=2)
    gateway = bus.gateway()
    for rank, num_state_slots in enumerate((6, 5)):
        bus.peer(Rank, f"worker-{rank}").hello(rank=rank, world_size=2, num_state_slots=num_state_slots)
    gateway.wait_ready()
    assert gateway.gauges().gauges["state_slots_total"] == 5
    bus.supervisor().send(msg.PeerLost("worker-0", "exit code -9"))
    gateway.expect(msg.EngineState, lambda s: s.state == "recovering")
    again = [bus.peer(Rank, f"again-{rank}") for rank in range(2)]
    for number, rank in enumerate(again):
        rank.hello(rank=number, world_size=2, group=1, num_state_slots=4)
    assert "5 state slots" in again[0].expect(msg.Shutdown).why


def test_a_malformed_result_fails_the_group_and_not_the_controller(bus: Bus) -> None:
    bus.start()
    gateway, rank = bus.gateway(), bus.rank("worker-0")
    gateway.wait_ready()
    gateway.add(1, max_tokens=1)
    plan = rank.plan()
    rank.send(msg.StepResult(plan.step_id, i32(1, 2, 3), 0.0))
    rank.expect(msg.Shutdown)
    bus.rank("worker-1", group=1).step()
    assert gateway.finish(1)[0] == [1000]


def test_deadlines_and_aborts_hold_while_there_are_no_workers(bus: Bus) -> None:
    bus.start()
    gateway, rank = bus.gateway(), bus.rank("worker-0")
    gateway.wait_ready()
    gateway.add(1, max_tokens=50, deadline=time.time() + 0.4)
    gateway.add(2, max_tokens=50)
    gateway.accepted(2)
    rank.plan()
    rank.send(msg.WorkerFailed(0, "gone"))
    gateway.expect(msg.EngineState, lambda s: s.state == "recovering")
    gateway.send(msg.AbortSequence(2, "the client is gone"))
    assert gateway.finish(2)[1].reason == "abort"
    assert gateway.finish(1)[1].detail == "deadline"


def test_why_a_rank_cannot_load_is_told_to_gateways(bus: Bus) -> None:
    bus.start()
    gateway = bus.gateway()
    bus.peer(Rank, "worker-0").send(msg.WorkerFailed(0, "OSError: no such file: model.safetensors"))
    state = gateway.expect(msg.EngineState)
    assert (state.state, "model.safetensors" in state.detail) == ("starting", True)
    bus.rank("worker-0", group=1)
    gateway.wait_ready()
