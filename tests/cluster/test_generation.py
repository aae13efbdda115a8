"""One call of the offline `LLM`, from what the controller says to what is returned."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import airside
from airside import SamplingParams
from airside.cluster import offline
from airside.cluster.offline.generation import Generation, Generations
from airside.controller.gateway.prompt import Prompt
from airside.controller.gateway.terms import TermsReader
from airside.controller.gateway.text_model import TextModel
from airside.proto import messages as msg
from tests.gateway.conftest import make_settings
from tests.gateway.tiny_checkpoint import write_checkpoint


class Call:
    """Generations of one call, and what they tell the controller."""

    def __init__(self, model: TextModel, folder: Path) -> None:
        self.model = model
        self.sent: list[msg.Message] = []
        self._terms = TermsReader(make_settings(folder, folder), model)
        self._generations: list[Generation] = []

    def add(self, *seq_ids: int, prompt: str = "ab", **params: Any) -> Generation:
        terms = self._terms.read(SamplingParams(n=len(seq_ids), **params).to_request(), 100, arrival=1.5)
        tokens = Prompt(self.model.encode(prompt, True).ids, [], [])
        self._generations.append(Generation(seq_ids, terms, tokens, self.model, self.sent.append))
        return self._generations[-1]

    def start(self) -> Generations:
        return Generations(self._generations)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(str(write_checkpoint(tmp_path_factory.mktemp("checkpoint"), images=False)))


@pytest.fixture
def call(model: TextModel, tmp_path: Path) -> Call:
    return Call(model, tmp_path)


def batch(rows: Sequence[tuple[int, list[int]]], *finished: msg.FinishedRow, **columns: Any) -> msg.OutputBatch:
    ids = [token_id for _, tokens in rows for token_id in tokens]
    return msg.OutputBatch(
        struct.pack(f"<{len(rows)}Q", *(seq_id for seq_id, _ in rows)),
        struct.pack(f"<{len(rows)}i", *(len(tokens) for _, tokens in rows)),
        struct.pack(f"<{len(ids)}i", *ids),
        list(finished),
        **columns,
    )


def end(seq_id: int, reason: str = "length", completion_tokens: int = 1) -> msg.FinishedRow:
    return msg.FinishedRow(seq_id, reason, "", 2, 0, completion_tokens, 0, 0.1, 0.2, 0.3, cached_tokens=1)


def record(logprob: float) -> bytes:
    return struct.pack("<4f", logprob, 0.25, float("nan"), float("nan"))


def test_continuations_are_sequences_of_their_own_with_seeds_of_their_own(call: Call) -> None:
    generation = call.add(7, 8, seed=5)
    first, second = generation.add_requests()
    assert (first.seq_id, second.seq_id, first.seed) == (7, 8, 5)
    assert second.seed != 5
    assert (first.request_id, first.arrival) == (second.request_id, second.arrival)
    running = call.start()
    a, b = call.model.encode("a", False).ids, call.model.encode("b", False).ids
    running.take(batch([(8, b), (7, a), (99, a)]))
    running.take(batch([(7, b)], end(7, completion_tokens=2)))
    assert running.unfinished == [8]
    running.take(batch([], end(8, "stop")))
    assert running.unfinished == []
    output = generation.output
    assert [completion.text for completion in output.outputs] == ["ab", "b"]
    assert [completion.seed for completion in output.outputs] == [5, second.seed]
    assert (output.text, output.token_ids, output.finish_reason) == ("ab", a + b, "length")
    assert (output.usage.completion_tokens, output.usage.cached_tokens) == (2, 1)
    assert output.timings.decode_s == pytest.approx(0.3)


def test_a_stop_string_ends_the_text_and_is_told_to_the_controller(call: Call) -> None:
    generation = call.add(7, stop="cd")
    running = call.start()
    ids = [call.model.encode(letter, False).ids[0] for letter in "abcdef"]
    running.take(batch([(7, ids[:3])]))
    assert not call.sent
    running.take(batch([(7, ids[3:])]))
    assert call.sent == [msg.StopSequence(7, 4, "stop string 'cd'")]
    running.take(batch([], end(7, "stop", 4)))
    (completion,) = generation.output.outputs
    assert (completion.text, completion.token_ids, completion.stop_match) == ("ab", ids[:4], "cd")


def test_log_probabilities_go_to_their_tokens(call: Call) -> None:
    generation = call.add(7, logprobs=0, prompt_logprobs=0)
    call.add(8)
    running = call.start()
    (a,), (b,) = call.model.encode("a", False).ids, call.model.encode("b", False).ids
    sizes = struct.pack("<2i", 0, 32)
    running.take(
        batch(
            [(8, [a]), (7, [a, b])],
            logprob_sizes=sizes,
            logprobs=record(-1.0) + record(-2.0),
            prompt_seq_ids=struct.pack("<Q", 7),
            prompt_sizes=struct.pack("<i", 16),
            prompt_logprobs=record(-3.0),
        )
    )
    output = generation.output
    assert [(row.token_id, row.logprob) for row in output.logprobs] == [(a, -1.0), (b, -2.0)]
    prompt_ids = output.prompt_token_ids
    assert [(row.token_id, row.logprob) for row in output.prompt_logprobs] == [(prompt_ids[1], -3.0)]


def test_what_was_never_begun_says_why(call: Call) -> None:
    generation = call.add(7)
    running = call.start()
    running.take(None)
    running.take(msg.Rejected(99, "invalid", "of another call"))
    running.take(msg.Rejected(7, "unavailable", "the engine is recovering"))
    assert running.unfinished == []
    assert generation.output.finish_reason == "rejected"
    assert generation.output.detail == "unavailable: the engine is recovering"


def test_the_package_has_all_that_goes_into_llm_and_comes_out_of_it() -> None:
    for name in airside.__all__:
        assert getattr(airside, name) is getattr(offline, name)
    assert set(airside.__all__) == {name for name, value in vars(offline).items() if isinstance(value, type)}


def test_times_of_images_are_in_the_output(call: Call) -> None:
    generation = call.add(7)
    running = call.start()
    stages = msg.ImageStages(queue_s=0.5, decode_s=0.25)
    running.take(msg.ImageReady(7, 0, 4, 0.25, cached=False, stages=stages))
    running.take(msg.ImageReady(7, 1, 4, 0.0, cached=True, stages=msg.ImageStages()))
    running.take(msg.ImageEncoded(7, 0, 0.125))
    running.take(msg.ImageEncoded(99, 0, 1.0))  # of a call before
    running.take(batch([], end(7)))
    output = generation.output
    assert output.usage.cached_images == 1
    assert (output.timings.images.queue_s, output.timings.images.decode_s) == (0.5, 0.25)
    assert output.timings.image_encode_s == 0.125
