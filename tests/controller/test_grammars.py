"""Structured sequences: rank 0 builds their grammars, nothing is sampled before, and a new launch builds them again."""

from __future__ import annotations

import pytest

from airside.proto import messages as msg
from tests.controller.conftest import Bus
from tests.controller.scripted import Gateway, Peer, Rank, read_i32, read_u64

GRAMMAR = '{"grammars": []}'


def serving(bus: Bus, **changes: object) -> tuple[Gateway, Rank]:
    bus.start(**changes)
    gateway, rank = bus.gateway(), bus.rank()
    gateway.wait_ready()
    return gateway, rank


def test_a_grammar_is_built_before_anything_is_sampled_and_closed_at_the_end(bus: Bus) -> None:
    gateway, rank = serving(bus)
    gateway.add(1, (1, 2, 3), grammar=GRAMMAR, max_tokens=1)
    assert rank.expect(msg.OpenGrammar) == msg.OpenGrammar(1, GRAMMAR, b"")
    prefill = rank.step()
    assert (read_i32(prefill.token_ids), list(prefill.sampled)) == ([1, 2], [0])
    assert not rank.heard(msg.StepPlan)
    rank.send(msg.GrammarReady(1))
    last = rank.step()
    assert (read_i32(last.token_ids), list(last.sampled), list(last.structured)) == ([3], [1], [1])
    assert gateway.finish(1)[0] == [1000]
    assert rank.expect(msg.CloseGrammar).seq_id == 1


def test_unstructured_sequences_have_no_grammar_to_open_or_close(bus: Bus) -> None:
    gateway, rank = serving(bus)
    gateway.add(1, max_tokens=1)
    rank.step()
    gateway.finish(1)
    assert not rank.heard(msg.OpenGrammar)
    assert not rank.heard(msg.CloseGrammar)


@pytest.mark.parametrize("is_ready", [False, True], ids=["while it is built", "while it is used"])
def test_a_grammar_that_fails_ends_its_sequence(bus: Bus, is_ready: bool) -> None:
    gateway, rank = serving(bus)
    gateway.add(1, (1, 2, 3), grammar=GRAMMAR, max_tokens=9)
    rank.expect(msg.OpenGrammar)
    rank.step()
    if is_ready:
        rank.send(msg.GrammarReady(1))
        rank.step()
    rank.send(msg.GrammarFailed(1, "too large"))
    rank.step_until_end(gateway, 1)
    _, end = gateway.finish(1)
    assert (end.reason, "too large" in end.detail) == ("structured_output_failed", True)
    assert rank.expect(msg.CloseGrammar).seq_id == 1


def test_a_new_launch_builds_every_live_grammar_past_what_was_made(bus: Bus) -> None:
    gateway, rank = serving(bus)
    gateway.add(1, (1, 2, 3), grammar=GRAMMAR, max_tokens=50)
    gateway.add(2, (4, 5), grammar="other", max_tokens=1)
    gateway.add(3, (8, 9), max_tokens=50)
    gateway.accepted(3)
    rank.send(msg.GrammarReady(1))
    rank.send(msg.GrammarReady(2))
    rank.step_until_end(gateway, 2)
    made, _ = gateway.finish(2)
    assert made == [1000]
    rank.send(msg.WorkerFailed(0, "gone"))
    gateway.expect(msg.EngineState, lambda s: s.state == "recovering")
    rank = bus.rank("worker-0-again", group=1)
    (opened,) = rank.heard(msg.OpenGrammar)
    assert (opened.seq_id, opened.grammar) == (1, GRAMMAR)
    assert read_i32(opened.output_ids)[:1] == [1000]
    held_back = rank.step()
    assert dict(zip(read_u64(held_back.seq_ids), held_back.sampled, strict=True))[1] == 0
    rank.send(msg.GrammarReady(1))
    rank.step_until_end(gateway, 1)
    assert gateway.finish(1)[0] == [1000 + position for position in range(50)]


def test_only_the_speaker_of_the_group_has_a_say_on_grammars(bus: Bus) -> None:
    bus.start(tensor_parallel_size=2)
    gateway = bus.gateway()
    first, second = bus.peer(Rank, "worker-0"), bus.peer(Rank, "worker-1")
    for number, rank in enumerate((first, second)):
        rank.hello(rank=number, world_size=2)
    gateway.wait_ready()
    gateway.add(1, (1, 2, 3), grammar=GRAMMAR, max_tokens=1)
    first.expect(msg.OpenGrammar)
    assert not second.heard(msg.OpenGrammar)
    stranger = bus.peer(Peer, "nobody")
    for peer in (second, stranger):
        peer.send(msg.GrammarReady(1))
        peer.send(msg.GrammarFailed(1, "no"))
        peer.heard(msg.Shutdown)
    first.step()
    assert not first.heard(msg.StepPlan)
    first.send(msg.GrammarReady(1))
    first.step()
    assert gateway.finish(1)[0] == [1000]


def test_an_aborted_sequence_has_its_grammar_closed_and_late_words_change_nothing(bus: Bus) -> None:
    gateway, rank = serving(bus)
    gateway.add(1, grammar=GRAMMAR)
    rank.expect(msg.OpenGrammar)
    gateway.send(msg.AbortSequence(1, "cancelled"))
    rank.step_until_end(gateway, 1)
    assert gateway.finish(1)[1].reason == "abort"
    assert rank.expect(msg.CloseGrammar).seq_id == 1
    for seq_id in (1, -1, 2**63):
        rank.send(msg.GrammarReady(seq_id))
        rank.send(msg.GrammarFailed(seq_id, "late"))
    gateway.add(2, max_tokens=1)
    rank.step_until_end(gateway, 2)
    assert gateway.finish(2)[0] == [1000]


def test_a_launch_that_is_over_has_no_say_on_grammars(bus: Bus) -> None:
    gateway, rank_before = serving(bus)
    gateway.add(1, (1, 2, 3), grammar=GRAMMAR, max_tokens=1)
    rank_before.expect(msg.OpenGrammar)
    rank_before.send(msg.WorkerFailed(0, "gone"))
    gateway.expect(msg.EngineState, lambda s: s.state == "recovering")
    rank_before.send(msg.GrammarFailed(1, "of no one's interest"))
    rank = bus.rank("worker-0-again", group=1)
    rank.expect(msg.OpenGrammar)
    rank_before.send(msg.GrammarReady(1))
    for _ in ("the loss", "GrammarFailed", "GrammarReady"):
        rank_before.expect(msg.Shutdown)
    rank.step()
    assert not rank.heard(msg.StepPlan), "it was sampled without its grammar"
    rank.send(msg.GrammarReady(1))
    rank.step()
    assert gateway.finish(1)[0] == [1000]
