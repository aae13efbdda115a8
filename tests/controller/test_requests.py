"""Text requests through a real controller and engine, with scripted gateways and model workers."""

from __future__ import annotations

import time

import pytest

from airside.proto import messages as msg
from tests.controller.conftest import Bus
from tests.controller.scripted import Gateway, read_i32, read_u64


def test_a_text_request_end_to_end(bus: Bus) -> None:
    bus.start()
    gateway = bus.gateway()
    rank = bus.rank()
    gateway.wait_ready()
    gateway.add(5, (11, 12, 13), max_tokens=3)
    assert gateway.accepted(5).queue_position == 0
    plan = rank.step()
    assert (read_u64(plan.seq_ids), read_i32(plan.token_ids)) == ([5], [11, 12, 13])
    assert read_i32(rank.step().token_ids) == [1000]
    rank.step()
    tokens, end = gateway.finish(5)
    assert tokens == [1000, 1001, 1002]
    assert (end.reason, end.prompt_tokens, end.completion_tokens) == ("length", 3, 3)


def test_the_engine_state_follows_the_workers(bus: Bus) -> None:
    bus.start()
    gateway = bus.peer(Gateway, "gateway-0")
    state = gateway.hello()
    assert (state.state, state.kv_tokens_max, state.max_model_len) == ("starting", 0, 128)
    gateway.add(1)
    assert gateway.expect(msg.Rejected).code == "unavailable"
    bus.rank(num_blocks=10)
    ready = gateway.expect(msg.EngineState)
    assert (ready.state, ready.kv_tokens_max) == ("ready", 40)
    assert gateway.hello() == ready  # asking again changes nothing


def test_two_gateways_get_their_own_tokens(bus: Bus) -> None:
    bus.start()
    first, second = bus.gateway("gateway-0"), bus.gateway("gateway-1")
    rank = bus.rank()
    first.wait_ready()
    first.add(1, max_tokens=2)
    plan = rank.plan()
    second.add(2, max_tokens=3)
    second.accepted(2)
    rank.answer(plan)
    assert read_u64(rank.step().seq_ids) == [1, 2]
    rank.step()
    rank.step()
    assert first.finish(1)[0] == [1000, 1001]
    assert second.finish(2)[0] == [1000, 1001, 1002]
    assert not first.heard(msg.OutputBatch)
    assert not second.heard(msg.OutputBatch)


def test_a_live_request_id_is_not_taken_twice(bus: Bus) -> None:
    bus.start()
    gateway, other = bus.gateway("gateway-0"), bus.gateway("gateway-1")
    rank = bus.rank()
    gateway.wait_ready()
    gateway.add(1, request_id="same", max_tokens=1)
    gateway.accepted(1)
    other.add(2, request_id="same")
    assert other.expect(msg.Rejected).code == "duplicate_id"
    rank.step()
    gateway.finish(1)
    other.add(3, request_id="same")
    other.accepted(3)


def test_a_full_queue_refuses(bus: Bus) -> None:
    bus.start(max_queued_requests=1)
    gateway, rank = bus.gateway(), bus.rank()
    gateway.wait_ready()
    gateway.add(1)
    rank.plan()  # sequence 1 is in flight, so the next one waits
    gateway.add(2)
    gateway.add(3)
    gateway.accepted(2)
    rejected = gateway.expect(msg.Rejected)
    assert (rejected.seq_id, rejected.code) == (3, "queue_full")


@pytest.mark.parametrize(
    "changes",
    [{"token_ids": b"\1\2\3"}, {"image_positions": [0]}, {"max_tokens": 0}],
    ids=["odd bytes", "a mark without an image", "no tokens"],
)
def test_a_malformed_request_is_refused_and_harms_nobody(bus: Bus, changes: dict[str, object]) -> None:
    bus.start()
    gateway, rank = bus.gateway(), bus.rank()
    gateway.wait_ready()
    gateway.add(1, (1, 2, 3), **changes)
    assert gateway.expect(msg.Rejected).code == "invalid"
    gateway.add(2, max_tokens=1)
    rank.step()
    assert gateway.finish(2)[0] == [1000]


def test_an_abort_in_mid_stream_frees_the_blocks_within_two_steps(bus: Bus) -> None:
    bus.start()
    gateway, rank = bus.gateway(), bus.rank()
    gateway.wait_ready()
    gateway.add(1, max_tokens=100)
    gateway.add(2, max_tokens=100)
    rank.step()
    rank.step()
    plan = rank.plan()
    gateway.send(msg.AbortSequence(1, "the client is gone"))
    tokens, end = gateway.finish(1)
    assert (tokens[:1], end.reason, end.detail) == ([1000], "abort", "the client is gone")
    live_before = gateway.gauges().gauges["kv_blocks_live"]
    rank.answer(plan)
    assert read_u64(rank.plan().seq_ids) == [2]
    assert gateway.gauges().gauges["kv_blocks_live"] < live_before


def test_abort_by_name(bus: Bus) -> None:
    bus.start()
    gateway, rank = bus.gateway(), bus.rank()
    gateway.wait_ready()
    gateway.add(1, request_id="mine", max_tokens=100)
    rank.plan()
    outcomes = []
    for query_id, name in enumerate(["mine", "mine", "nobody's"]):
        gateway.send(msg.AbortByName(query_id, name))
        outcomes.append(gateway.expect(msg.AbortOutcome).outcome)
    assert outcomes == ["aborted", "already_finished", "unknown"]
    assert gateway.finish(1)[1].reason == "abort"


def test_a_deadline_ends_a_sequence_though_no_step_comes_back(bus: Bus) -> None:
    bus.start()
    gateway, rank = bus.gateway(), bus.rank()
    gateway.wait_ready()
    gateway.add(1, deadline=time.time() + 0.2, max_tokens=100)
    rank.plan()
    _, end = gateway.finish(1)
    assert (end.reason, end.detail) == ("abort", "deadline")


def test_a_lost_gateway_leaves_no_sequence_behind(bus: Bus) -> None:
    bus.start()
    gateway, other, rank = bus.gateway("gateway-0"), bus.gateway("gateway-1"), bus.rank()
    gateway.wait_ready()
    gateway.add(1, max_tokens=100)
    rank.plan()
    bus.supervisor().send(msg.PeerLost("gateway-0", "exit code -9"))
    other.await_peer("gateway-0", "lost")
    assert other.gauges().requests_finished["abort"] == 1
    gateway.send(msg.Heartbeat(1))
    gateway.expect(msg.Shutdown)


def test_a_new_gateway_process_of_the_same_name_starts_afresh(bus: Bus) -> None:
    bus.start()
    gateway, rank = bus.gateway(), bus.rank()
    gateway.wait_ready()
    gateway.add(1, max_tokens=100)
    plan = rank.plan()
    gateway.send(msg.GatewayHello("local", gateway.pid + 1))
    gateway.expect(msg.EngineState)
    rank.answer(plan)
    gateway.add(2, max_tokens=1)
    rank.step()
    assert gateway.finish(2)[0] == [1000]
    assert gateway.gauges().requests_finished["abort"] == 1


def test_gauges_carry_the_names_of_the_public_api(bus: Bus) -> None:
    from airside.proto import airside_pb2

    bus.start()
    gateway, rank = bus.gateway(), bus.rank()
    gateway.wait_ready()
    gateway.add(1, max_tokens=2)
    rank.step()
    rank.step()
    gateway.finish(1)
    answer = gateway.gauges()
    names = {field.name for field in airside_pb2.Gauges.DESCRIPTOR.fields}
    assert set(answer.gauges) == names - {"requests_finished", "bus_messages_refused"}
    assert answer.requests_finished["length"] == 1
    assert (answer.gauges["steps"], answer.gauges["prompt_tokens"]) == (2, 3)
    assert answer.gauges["controller_step_s"] > 0


def test_a_gateway_that_this_controller_never_met_is_sent_away(bus: Bus) -> None:
    bus.start()
    bus.rank()
    stranger = bus.peer(Gateway, "gateway-of-old")
    stranger.add(1)
    assert stranger.expect(msg.Rejected).code == "unavailable"
    stranger.expect(msg.Shutdown)


def test_a_gateway_that_was_silent_too_long_may_say_hello_again(bus: Bus) -> None:
    bus.start(silence_timeout_s=2.0)
    gateway, watcher = bus.gateway(), bus.peer(Gateway, "watcher")
    watcher.await_peer("gateway-0", "lost")
    gateway.send(msg.Heartbeat(1))
    gateway.expect(msg.Shutdown)
    gateway.hello()
    bus.rank()
    gateway.wait_ready()
    gateway.add(1)
    gateway.accepted(1)
