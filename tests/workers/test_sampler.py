"""From logits to tokens: bans, forced tokens, penalties, biases, allowed ids, and rows that make no token."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch

from airside.proto.logprob_record import read_records
from airside.proto.messages import StepPlan
from airside.workers.sampler import Sampler
from airside.workers.sampling_batch import list_sampled_rows, tokens_that_count
from airside.workers.sequence_states import SequenceStates
from airside.workers.step_batch import read_rows
from tests.workers.step_plans import Rules, Track, plan_step

CPU = torch.device("cpu")
VOCAB = 40


def sample(sampler: Sampler, plan: StepPlan, logits: torch.Tensor) -> list[int]:
    sampler.begin(plan)
    tokens: list[int] = sampler.sample(plan, read_rows(plan), logits.clone()).tokens.tolist()
    return tokens


def greedy(logits: torch.Tensor, **columns: object) -> list[int]:
    tracks = [Track(row, [1], [row]) for row in range(len(logits))]
    plan = dataclasses.replace(plan_step(1, tracks, [1] * len(tracks)), **columns)  # type: ignore[arg-type]
    return sample(Sampler(None, None, CPU), plan, logits)


def test_each_position_has_its_own_bans() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0]).repeat(4, 1)
    assert greedy(logits) == [3, 3, 3, 3]
    assert greedy(logits, banned={0: [3], 2: [3, 2], 3: [0]}) == [2, 3, 1, 3]


def test_a_row_of_nothing_but_nan_makes_no_token_and_spares_the_others() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0]).repeat(3, 1)
    logits[1] = torch.nan
    assert greedy(logits, banned={row: [3] for row in range(3)}) == [2, -1, 2]


def test_a_forced_token_takes_the_place_of_the_sampled_one() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0]).repeat(3, 1)
    logits[2] = torch.nan
    forced = np.array([-1, 0, 1], np.int32).tobytes()
    assert greedy(logits, forced=forced) == [3, 0, 1]
    with pytest.raises(AssertionError, match="not every position says whether it is forced"):
        greedy(logits, forced=forced[:4])


@pytest.mark.parametrize(
    ("sampled", "drafts", "count"),
    [
        ([5], [], [5]),
        ([5, 6, 7], [5, 6], [5, 6, 7]),
        ([5, 6, 7], [5, 9], [5, 6]),
        ([5, 6, 7], [4, 6], [5]),
        ([-1, 6], [4], [-1]),
    ],
)
def test_tokens_count_up_to_the_first_that_is_not_its_draft(
    sampled: list[int], drafts: list[int], count: list[int]
) -> None:
    assert tokens_that_count(sampled, drafts) == count


def adjusted_by_numpy(logits: np.ndarray, prompt: list[int], output: list[int], rules: Rules) -> np.ndarray:
    """One position's logits after its rules, token by token."""
    made = Counter(output)
    result = logits.astype(np.float64)
    for token in range(len(logits)):
        if token in prompt or token in made:
            penalty = rules.repetition_penalty
            result[token] = result[token] / penalty if result[token] > 0 else result[token] * penalty
        result[token] -= rules.frequency_penalty * made[token]
        result[token] -= rules.presence_penalty * (made[token] > 0)
        result[token] += rules.logit_bias.get(token, 0.0)
        if rules.allowed_token_ids and token not in rules.allowed_token_ids:
            result[token] = -np.inf
    return result


ALL_RULES = [
    Rules(repetition_penalty=1.5),
    Rules(repetition_penalty=0.7),
    Rules(presence_penalty=0.9),
    Rules(frequency_penalty=-0.4),
    Rules(repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.6),
    Rules(logit_bias={3: 100.0, 7: -100.0, 8: 0.5}),
    Rules(allowed_token_ids=[2, 9, 30]),
    Rules(1.3, 0.2, 0.1, {9: -2.0, 5: 1.0}, [5, 9, 12]),
]


@pytest.mark.parametrize("drafts", [[], [4, 4, 9]])
def test_rules_are_those_of_numpy_over_many_steps(drafts: list[int]) -> None:
    """All sequences in one batch, with one beside them that has no rules; drafts are mostly rejected."""
    random = np.random.default_rng(5)
    tracks = [
        Track(
            seq_id=seq_id,
            tokens=random.integers(0, VOCAB, 3 + seq_id).tolist(),
            blocks=list(range(20 * seq_id, 20 * seq_id + 20)),
            rules=rules,
        )
        for seq_id, rules in enumerate([*ALL_RULES, None])
    ]
    states = SequenceStates(CPU)
    for step_id in range(6):
        for track in tracks:
            track.drafts = list(drafts)
        plan = plan_step(step_id, tracks, [len(track.tokens) - track.computed for track in tracks])
        for opened in plan.opened:
            states.open(opened)
        rows = list_sampled_rows(plan, read_rows(plan))
        logits = torch.from_numpy(random.normal(0, 2, (rows[-1].end, VOCAB)).astype(np.float32))
        adjusted = logits.clone()
        states.adjust(adjusted, rows)
        sampled = random.choice([4, 9, 11], rows[-1].end).tolist()
        states.take(rows, sampled)
        for row, track in zip(rows, tracks, strict=True):
            for j in range(1 + len(drafts)):
                exact = adjusted_by_numpy(
                    logits[row.begin + j].numpy(),
                    track.tokens[: track.num_prompt_tokens],
                    track.made + drafts[:j],
                    track.rules or Rules(),
                )
                np.testing.assert_allclose(adjusted[row.begin + j].numpy(), exact, rtol=1e-5, atol=1e-5)
            track.computed = len(track.tokens)
            track.take(tokens_that_count(sampled[row.begin : row.end], drafts))


def test_what_is_sampled_again_after_a_preemption_counts_once() -> None:
    states = SequenceStates(CPU)
    track = Track(1, [5, 6], [0, 1, 2], rules=Rules(frequency_penalty=1.0))
    plan = plan_step(1, [track], [2])
    states.open(plan.opened[0])
    rows = list_sampled_rows(plan, read_rows(plan))
    for _ in range(3):  # the same place of the output, each time
        logits = torch.zeros(1, VOCAB)
        states.adjust(logits, rows)
        assert logits.count_nonzero() == 0
        states.take(rows, [7])


def test_a_row_behind_the_end_of_its_sequence_is_computed_in_vain() -> None:
    states = SequenceStates(CPU)
    track = Track(1, [5, 6], [0, 1, 2], rules=Rules(repetition_penalty=2.0))
    plan = plan_step(1, [track], [2])
    states.open(plan.opened[0])
    states.take(list_sampled_rows(plan, read_rows(plan)), [-1])
    track.take([-1])
    ahead = plan_step(2, [track], [3])
    states.adjust(torch.zeros(1, VOCAB), list_sampled_rows(ahead, read_rows(ahead)))


def test_a_closed_sequence_has_no_rules() -> None:
    sampler = Sampler(None, None, CPU)
    track = Track(1, [5, 6], [0, 1, 2], rules=Rules(allowed_token_ids=[3]))
    logits = torch.arange(VOCAB, dtype=torch.float32)[None]
    plan = plan_step(1, [track], [2])
    assert sample(sampler, plan, logits) == [3]
    assert sample(sampler, dataclasses.replace(plan, opened=[]), logits) == [3]
    closed = np.array([1], np.uint64).tobytes()
    assert sample(sampler, dataclasses.replace(plan, opened=[], closed=closed), logits) == [VOCAB - 1]


def test_a_gap_in_the_output_is_noticed() -> None:
    states = SequenceStates(CPU)
    track = Track(1, [5, 6], [0, 1, 2], rules=Rules(frequency_penalty=1.0))
    states.open(plan_step(1, [track], [2]).opened[0])
    track.take([7])
    plan = plan_step(2, [track], [3])
    with pytest.raises(AssertionError, match="too few are known"):
        states.adjust(torch.zeros(1, VOCAB), list_sampled_rows(plan, read_rows(plan)))


@pytest.mark.parametrize("with_records", [False, True])
def test_picture_tokens_are_never_sampled_and_their_probabilities_told(with_records: bool) -> None:
    plan = plan_step(1, [Track(0, [5], [0], logprobs=2 if with_records else -1)], [1])
    logits = torch.tensor([[1.0, 9.0, 3.0, 2.0]])
    sampler = Sampler(None, None, CPU, picture_ids=(1, 2))
    sampler.begin(plan)
    sampled = sampler.sample(plan, read_rows(plan), logits)
    assert sampled.tokens.tolist() == [3]
    if with_records:
        (record,) = read_records(sampled.logprobs, 1)
        assert record.top_ids == [1, 2]
