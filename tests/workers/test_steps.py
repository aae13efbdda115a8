"""Executing plans: placeholders, drafts, rules and records change nothing about the tokens of anybody."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from airside.proto.logprob_record import LogprobRecord, read_records, record_bytes
from airside.proto.messages import StepPlan, StepResult
from airside.workers.model_runner import ModelRunner
from tests.workers.step_plans import (
    Rules,
    Track,
    lone_runner,
    plan_step,
    run_tracks,
    run_tracks_ahead,
    scattered_blocks,
)

PROMPTS = [[7, 100, 200, 300, 5], list(range(60, 101)), [9], [11, 12] * 20]
NUM_TOKENS = 14
RULES = Rules(1.3, 0.4, 0.2, {17: 1.5}, [])


@pytest.fixture(scope="module")
def runner(llama_path: Path) -> ModelRunner:
    return lone_runner(llama_path, 128)


def tracks() -> list[Track]:
    """Greedy, sampled, with rules, and with records."""
    blocks = scattered_blocks(len(PROMPTS), 16)
    made = [
        Track(i, list(prompt), table, seed=90 + i)
        for i, (prompt, table) in enumerate(zip(PROMPTS, blocks, strict=True))
    ]
    made[1].temperature, made[1].top_k = 1.0, 50
    made[2].rules, made[2].temperature = RULES, 0.7
    made[3].rules = dataclasses.replace(RULES, allowed_token_ids=list(range(100)))
    return made


@pytest.fixture(scope="module")
def plain(runner: ModelRunner) -> list[list[int]]:
    """What the sequences make one after another, each alone and in one piece."""
    return [run_tracks(runner.execute, [track], 512, NUM_TOKENS)[0] for track in tracks()]


@pytest.mark.parametrize("chunk", [3, 16, 512])
def test_together_is_as_alone(runner: ModelRunner, plain: list[list[int]], chunk: int) -> None:
    assert run_tracks(runner.execute, tracks(), chunk, NUM_TOKENS) == plain
    assert len({tuple(made) for made in plain}) == len(plain)


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_planning_ahead_changes_nothing(runner: ModelRunner, plain: list[list[int]], chunk: int) -> None:
    plans: list[StepPlan] = []

    def execute(plan: StepPlan) -> StepResult | None:
        plans.append(plan)
        return runner.execute(plan)

    assert run_tracks_ahead(execute, tracks(), chunk, NUM_TOKENS) == plain
    negative = sum((np.frombuffer(plan.token_ids, np.int32) < 0).sum() for plan in plans)
    assert negative >= len(plain) * (NUM_TOKENS - 1)


def test_a_placeholder_of_a_step_that_is_not_the_one_before_is_noticed(runner: ModelRunner) -> None:
    track = tracks()[0]
    run_tracks(runner.execute, [track], 512, 1)
    track.tokens[-1] = -1
    with pytest.raises(AssertionError, match="step 7 came after step 0"):
        runner.execute(plan_step(7, [track], [1]))


def draft_right(plain: list[list[int]]) -> Callable[[Track], list[int]]:
    return lambda track: plain[track.seq_id][len(track.made) : len(track.made) + 4]


def draft_wrong(plain: list[list[int]]) -> Callable[[Track], list[int]]:
    return lambda track: [(token + 1) % 300 for token in draft_right(plain)(track)]


def draft_at_random(plain: list[list[int]]) -> Callable[[Track], list[int]]:
    random = np.random.default_rng(3)

    def propose(track: Track) -> list[int]:
        right = draft_right(plain)(track)[: int(random.integers(0, 5))]
        spoilt = random.random(len(right)) < 0.3
        return [5 if spoil else token for token, spoil in zip(right, spoilt, strict=True)]

    return propose


@pytest.mark.parametrize(
    ("drafting", "steps_at_most"), [(draft_right, 4), (draft_wrong, NUM_TOKENS), (draft_at_random, NUM_TOKENS)]
)
def test_drafts_change_nothing_but_the_number_of_steps(
    runner: ModelRunner,
    plain: list[list[int]],
    drafting: Callable[[list[list[int]]], Callable[[Track], list[int]]],
    steps_at_most: int,
) -> None:
    steps: list[int] = []

    def execute(plan: StepPlan) -> StepResult | None:
        steps.append(plan.step_id)
        return runner.execute(plan)

    assert run_tracks(execute, tracks(), 512, NUM_TOKENS, propose=drafting(plain)) == plain
    assert len(steps) <= steps_at_most


def test_forced_tokens_are_the_output_and_can_be_forced_several_at_once(runner: ModelRunner) -> None:
    golden = [3, 200, 44, 17, 9]
    [track] = tracks()[:1]
    track.forced, track.logprobs = golden, 0
    drafted = dataclasses.replace(track, tokens=list(track.tokens), made=[], logprobs=0)
    one_by_one = Records(runner)
    at_once = Records(runner)
    assert run_tracks(one_by_one.execute, [track], 512, len(golden)) == [golden]
    assert run_tracks(at_once.execute, [drafted], 512, len(golden), propose=lambda own: golden[len(own.made) :]) == [
        golden
    ]
    assert len(at_once.steps) == 1
    assert repr(at_once.sampled(drafted.seq_id)) == repr(one_by_one.sampled(track.seq_id))


class Records:
    """Keeps what steps say of log-probabilities, by sequence; and the model's logits, for comparison."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.steps: list[tuple[StepPlan, StepResult]] = []

    def execute(self, plan: StepPlan) -> StepResult | None:
        result = self._runner.execute(plan)
        assert result is not None
        self.steps.append((plan, result))
        return result

    def sampled(self, seq_id: int) -> list[LogprobRecord]:
        """Of all sampled positions, rejected drafts included."""
        return [
            record
            for plan, result in self.steps
            for owner, records in split_sampled(plan, result.logprobs)
            if owner == seq_id
            for record in records
        ]

    def prompt(self, seq_id: int) -> list[LogprobRecord]:
        found: list[LogprobRecord] = []
        for plan, result in self.steps:
            begin = 0
            for row in plan.prompt_logprobs:
                count = len(row.targets) // 4
                end = begin + count * record_bytes(row.k)
                if np.frombuffer(plan.seq_ids, np.uint64)[row.row] == seq_id:
                    found += read_records(result.prompt_logprobs[begin:end], count)
                begin = end
            assert begin == len(result.prompt_logprobs)
        return found


def split_sampled(plan: StepPlan, data: bytes) -> Iterator[tuple[int, list[LogprobRecord]]]:
    """Each sampling row's sequence and records."""
    sampled = np.frombuffer(plan.sampled, np.uint8)
    seq_ids = np.frombuffer(plan.seq_ids, np.uint64)[sampled > 0].tolist()
    begin = 0
    ks = np.frombuffer(plan.logprobs, np.int32).tolist() or [-1] * len(seq_ids)
    for seq_id, count, k in zip(seq_ids, sampled[sampled > 0].tolist(), ks, strict=True):
        if k >= 0:
            end = begin + count * record_bytes(k)
            yield seq_id, read_records(data[begin:end], count)
            begin = end
    assert begin == len(data)


def all_logits(runner: ModelRunner, tokens: list[int]) -> Tensor:
    """[len(tokens), vocab]: the model's logits after each token."""
    seen: list[Tensor] = []
    model = runner._model
    logits_of = model.logits

    def spy(hidden: Tensor) -> Tensor | None:
        logits = logits_of(hidden)
        assert logits is not None
        seen.append(logits.clone())
        return logits

    model.logits = spy  # type: ignore[method-assign]
    try:
        runner.execute(plan_step(0, [Track(99, tokens, list(range(32)), prompt_logprobs=0)], [len(tokens)]))
    finally:
        model.logits = logits_of  # type: ignore[method-assign]
    last, *rest = seen
    return torch.cat([*rest, last])


def check_record(record: LogprobRecord, logits: Tensor, token: int, k: int) -> None:
    """Against float64 numpy."""
    exact = logits.double().numpy()
    log_p = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    assert record.logprob == pytest.approx(log_p[token], abs=1e-5)
    assert record.sum_smaller == pytest.approx(np.exp(log_p[exact < exact[token]]).sum(), abs=1e-5)
    assert np.isnan([record.nextn_logprob, record.confidence]).all()
    order = np.argsort(-exact, kind="stable")[:k]
    assert record.top_ids == order.tolist()
    np.testing.assert_allclose(record.top_logprobs, log_p[order], atol=1e-5)


@pytest.mark.parametrize("ks", [[0, 1, 5, 20], [-1, 20, -1, 0]])
def test_records_are_of_the_raw_distribution(runner: ModelRunner, plain: list[list[int]], ks: list[int]) -> None:
    own = tracks()
    for track, k in zip(own, ks, strict=True):
        track.logprobs = k
    records = Records(runner)
    assert run_tracks(records.execute, own, 16, NUM_TOKENS) == plain, "records change no token"
    for track, k in zip(own, ks, strict=True):
        found = records.sampled(track.seq_id)
        assert len(found) == (NUM_TOKENS if k >= 0 else 0)
        logits = all_logits(runner, track.tokens)[track.num_prompt_tokens - 1 :]
        for record, row, token in zip(found, logits, track.made, strict=False):
            check_record(record, row, token, k)


def test_records_beside_drafts_are_in_the_plans_order(runner: ModelRunner, plain: list[list[int]]) -> None:
    own = tracks()
    for track in own:
        track.logprobs = track.seq_id
    undrafted = Records(runner)
    run_tracks(undrafted.execute, tracks_with_records(), 512, NUM_TOKENS)
    records = Records(runner)
    run_tracks(records.execute, own, 512, NUM_TOKENS, propose=draft_right(plain))
    for track in own:
        assert repr(records.sampled(track.seq_id)) == repr(undrafted.sampled(track.seq_id)), "in every bit"


def tracks_with_records() -> list[Track]:
    own = tracks()
    for track in own:
        track.logprobs = track.seq_id
    return own


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_prompt_records_do_not_depend_on_chunks(runner: ModelRunner, chunk: int) -> None:
    own = tracks()
    for track, k in zip(own, [2, 0, 5, -1], strict=True):
        track.prompt_logprobs = k
    records = Records(runner)
    run_tracks(records.execute, own, chunk, 2)
    for track, prompt in zip(own, PROMPTS, strict=True):
        found = records.prompt(track.seq_id)
        assert len(found) == (len(prompt) - 1 if track.prompt_logprobs >= 0 else 0)
        logits = all_logits(runner, prompt)
        for record, row, token in zip(found, logits, prompt[1:], strict=False):
            check_record(record, row, token, track.prompt_logprobs)


def test_a_long_prompt_is_scored_in_parts(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def scored() -> list[LogprobRecord]:
        records = Records(runner)
        run_tracks(records.execute, [dataclasses.replace(tracks()[1], prompt_logprobs=3)], 512, 1)
        return records.prompt(1)

    whole = scored()
    monkeypatch.setattr("airside.workers.logprobs._LOGITS_AT_ONCE", 512 * 3)
    assert repr(scored()) == repr(whole)
