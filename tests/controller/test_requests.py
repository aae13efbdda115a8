"""Text requests through a real controller and engine, with scripted gateways and model workers."""

from __future__ import annotations

import time

import pytest

from airside.proto import messages as msg
from airside.proto.logprob_record import record_bytes
from tests.controller.conftest import Bus
from tests.controller.scripted import Gateway, i32, read_i32, read_u64


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
    live_before = gateway.gauges().gauges["kv_blocks_live"]
    gateway.send(msg.AbortSequence(1, "the client is gone"))
    tokens, end = gateway.finish(1)
    assert (tokens[:1], end.reason, end.detail) == ([1000], "abort", "the client is gone")
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
    maps = {"requests_finished", "bus_messages_refused", "controller_phase_s", "bus_messages"}
    assert set(answer.gauges) == names - maps
    assert answer.requests_finished["length"] == 1
    assert set(answer.controller_phase_s) == {"schedule", "build", "send", "apply", "reply"}
    assert all(seconds > 0 for seconds in answer.controller_phase_s.values())
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


def test_continuations_of_one_request_share_its_id_and_are_aborted_together(bus: Bus) -> None:
    bus.start()
    gateway, other, rank = bus.gateway("gateway-0"), bus.gateway("gateway-1"), bus.rank()
    gateway.wait_ready()
    for seq_id in (1, 2, 3):
        gateway.add(seq_id, request_id="mine", arrival=1234.5, max_tokens=1 if seq_id == 1 else 99)
        gateway.accepted(seq_id)
    rank.step()
    gateway.finish(1)
    for peer, seq_id, arrival in ((gateway, 4, 1234.75), (other, 5, 1234.5)):
        peer.add(seq_id, request_id="mine", arrival=arrival)
        assert peer.expect(msg.Rejected).code == "duplicate_id"
    gateway.send(msg.AbortByName(1, "mine"))
    assert gateway.expect(msg.AbortOutcome).outcome == "aborted"
    rank.step()
    assert [gateway.finish(seq_id)[1].reason for seq_id in (1, 2, 3)] == ["length", "abort", "abort"]
    gateway.send(msg.AbortByName(2, "mine"))
    assert gateway.expect(msg.AbortOutcome).outcome == "already_finished"


def test_a_stop_string_ends_a_sequence_where_the_gateway_says(bus: Bus) -> None:
    bus.start()
    gateway, rank = bus.gateway(), bus.rank()
    gateway.wait_ready()
    gateway.add(1, max_tokens=99)
    for _ in range(3):
        rank.step()
    plan = rank.plan()
    gateway.add(2, max_tokens=4)
    gateway.send(msg.StopSequence(1, 2, "stop string 'x'"))
    gateway.send(msg.StopSequence(9, 1, "of a sequence that nobody knows"))
    rank.answer(plan)
    rank.step_until_end(gateway, 1, 2)
    _, end = gateway.finish(1)
    assert (end.reason, end.detail, end.completion_tokens) == ("stop", "stop string 'x'", 2)
    assert gateway.finish(2)[0] == [1000, 1001, 1002, 1003]


def test_a_stop_after_more_tokens_than_there_can_be_is_refused(bus: Bus) -> None:
    bus.start()
    gateway, rank = bus.gateway(), bus.rank()
    gateway.wait_ready()
    gateway.add(1, max_tokens=2)
    rank.step()
    gateway.send(msg.StopSequence(1, 2**63, "no"))
    rank.step()
    assert gateway.finish(1)[1].reason == "length"
    assert gateway.gauges().bus_messages_refused == {"unexpected_StopSequence": 1}


def test_what_the_sampler_must_know_travels_with_the_first_plan_and_is_let_go_after_the_end(bus: Bus) -> None:
    bus.start()
    gateway, rank = bus.gateway(), bus.rank()
    gateway.wait_ready()
    penalties = {"repetition_penalty": 1.5, "presence_penalty": 0.25, "frequency_penalty": -0.5}
    gateway.add(1, logit_bias={5: 2.0}, allowed_token_ids=[1000, 1001], max_tokens=2, **penalties)
    (opened,) = rank.step().opened
    assert opened == msg.OpenedRow(1, 3, i32(1, 2, 3), 1.5, 0.25, -0.5, {5: 2.0}, [1000, 1001])
    plan = rank.step()
    assert (plan.opened, plan.closed) == ([], b"")
    gateway.finish(1)
    gateway.add(2, max_tokens=1)
    assert read_u64(rank.step().closed) == [1]


def test_log_probabilities_reach_the_gateway_that_asked(bus: Bus) -> None:
    bus.start()
    gateway, rank = bus.gateway(), bus.rank()
    gateway.wait_ready()
    gateway.add(1, (1, 2, 3), logprobs=0, prompt_logprobs=1, max_tokens=1)
    plan = rank.plan()
    (row,) = plan.prompt_logprobs
    assert (row.row, row.start, row.k, read_i32(row.targets)) == (0, 0, 1, [2, 3])
    assert read_i32(plan.logprobs) == [0]
    rank.answer(plan, logprobs=b"l" * record_bytes(0), prompt_logprobs=b"p" * 2 * record_bytes(1))
    batch = gateway.expect(msg.OutputBatch, lambda batch: bool(batch.seq_ids))
    assert (batch.logprobs, read_i32(batch.logprob_sizes)) == (b"l" * record_bytes(0), [record_bytes(0)])
    assert (batch.prompt_logprobs, read_u64(batch.prompt_seq_ids)) == (b"p" * 2 * record_bytes(1), [1])
    assert read_i32(batch.prompt_sizes) == [2 * record_bytes(1)]
    assert batch.step_tokens == 3
