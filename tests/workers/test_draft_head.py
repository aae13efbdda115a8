"""The draft head's proposals against a reference, and tokens that do not depend on them."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from airside.proto.logprob_record import read_records
from airside.workers.draft_head import DraftHead
from airside.workers.model_config import CheckpointError
from airside.workers.model_runner import ModelRunner
from tests.checkpoints import make_mimo
from tests.workers.draft_plans import Proposals, run_drafted
from tests.workers.mtp_reference import MtpReference
from tests.workers.ranks import start_ranks
from tests.workers.step_plans import (
    BLOCK_SIZE,
    Track,
    apply_step,
    lone_runner,
    plan_step,
    run_tracks,
    run_tracks_ahead,
    scattered_blocks,
)

PROMPTS = [[7, 100, 200, 300, 5], list(range(60, 101)), [9], [11, 12] * 10]
NUM_TOKENS = 10
WANTED = 3
NUM_BLOCKS = 96
CONTEXT = 0.02  # see make_mimo: some drafts are right and some are not


@pytest.fixture(scope="module")
def mimo_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drafts are wrong."""
    return make_mimo(tmp_path_factory.mktemp("mimo"))


@pytest.fixture(scope="module")
def often_right_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mimo(tmp_path_factory.mktemp("often"), context=CONTEXT)


@pytest.fixture(scope="module")
def always_right_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mimo(tmp_path_factory.mktemp("always"), context=0.0)


def runner_for(path: Path, **changes: object) -> ModelRunner:
    values: dict[str, object] = {"draft_method": "mtp", "max_draft_tokens": 8, **changes}
    return lone_runner(path, NUM_BLOCKS, **values)


def tracks_for(prompts: list[list[int]]) -> list[Track]:
    blocks = scattered_blocks(len(prompts), NUM_BLOCKS // len(prompts))
    return [Track(i, list(prompt), table) for i, (prompt, table) in enumerate(zip(prompts, blocks, strict=True))]


def expect_reference(reference: MtpReference, proposals: Proposals, tracks: list[Track]) -> None:
    """All that was proposed is what the reference drafts after the same tokens."""
    tokens = {track.seq_id: track.tokens for track in tracks}
    assert proposals.made
    for proposal in proposals.made:
        expected, log_q = reference.drafts(tokens[proposal.seq_id][: proposal.num_known], len(proposal.drafts))
        assert proposal.drafts == expected
        np.testing.assert_allclose(proposal.confidences, log_q.max(dim=1).values.exp(), rtol=1e-3)


@pytest.mark.parametrize("chunk", [1, 3, 16, 512])
@pytest.mark.parametrize("checkpoint", ["mimo_path", "often_right_path"])
def test_proposals_are_those_of_the_reference(checkpoint: str, chunk: int, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(checkpoint)
    proposals, tracks = Proposals(runner_for(path).execute), tracks_for(PROMPTS)
    run_drafted(proposals, tracks, chunk, NUM_TOKENS, WANTED)
    expect_reference(MtpReference(path), proposals, tracks)
    if checkpoint == "often_right_path":
        assert 0 < proposals.num_accepted < proposals.num_verified, "rows of one kind only were seen"


def test_a_head_that_knows_the_model_is_always_right(always_right_path: Path) -> None:
    proposals = Proposals(runner_for(always_right_path).execute)
    made = run_drafted(proposals, tracks_for(PROMPTS), 16, 13, WANTED)
    assert made == run_tracks(runner_for(always_right_path).execute, tracks_for(PROMPTS), 16, 13)
    # The first token comes from the prompt, the other twelve by fours.
    assert proposals.num_accepted == proposals.num_verified == 3 * WANTED * len(PROMPTS)


@pytest.mark.parametrize(("temperature", "dtype"), [(0.0, "float32"), (1.0, "float32"), (1.0, "bfloat16")])
@pytest.mark.parametrize("checkpoint", ["mimo_path", "often_right_path", "always_right_path"])
def test_tokens_do_not_depend_on_drafts(
    checkpoint: str, temperature: float, dtype: str, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(checkpoint)

    def tracks() -> list[Track]:
        made = tracks_for(PROMPTS)
        for track in made:
            track.temperature, track.seed = temperature, 17 + track.seq_id
        return made

    random = np.random.default_rng(0)

    def spoil(drafts: list[int]) -> list[int]:
        return [draft if random.random() < 0.8 else int(random.integers(512)) for draft in drafts]

    undrafted = runner_for(path, dtype=dtype, draft_method="none", max_draft_tokens=0)
    plain = run_tracks(undrafted.execute, tracks(), 16, NUM_TOKENS)
    for wanted in (1, 5):
        proposals = Proposals(runner_for(path, dtype=dtype).execute, spoil)
        assert run_drafted(proposals, tracks(), 7, NUM_TOKENS, wanted) == plain
        assert proposals.num_verified > 0


@pytest.mark.slow
def test_two_ranks_propose_the_same(often_right_path: Path) -> None:
    changes = {"draft_method": "mtp", "max_draft_tokens": 8}
    prompts = [prompt for prompt in PROMPTS if len(prompt) > 4]  # the first step samples nothing
    tracks = tracks_for(prompts)
    with (
        tempfile.TemporaryDirectory(prefix="airside-test-") as folder,
        start_ranks(often_right_path, Path(folder), 2, **changes) as ranks,
    ):
        ranks.set_up(NUM_BLOCKS)
        proposals = Proposals(ranks.step)
        made = run_drafted(proposals, tracks, 4, NUM_TOKENS, WANTED)
        assert ranks.shut_down() == [0, 0]
    assert made == run_tracks(runner_for(often_right_path).execute, tracks_for(prompts), 16, NUM_TOKENS)
    expect_reference(MtpReference(often_right_path), proposals, tracks)
    assert 0 < proposals.num_accepted < proposals.num_verified


def test_a_sequence_that_starts_over_is_drafted_as_before(mimo_path: Path) -> None:
    runner = runner_for(mimo_path)
    (track,) = tracks_for(PROMPTS[1:2])
    runner.execute(plan_step(0, [track], [16]))  # leaves a state behind for a row that never comes
    other_blocks = track.blocks[8:] + track.blocks[:8]
    again = Track(track.seq_id, track.tokens, other_blocks)
    proposals = Proposals(runner.execute)
    run_drafted(proposals, [again], 13, NUM_TOKENS, WANTED)
    expect_reference(MtpReference(mimo_path), proposals, [again])


def test_steps_planned_ahead_leave_nothing_out(mimo_path: Path) -> None:
    runner, tracks = runner_for(mimo_path), tracks_for(PROMPTS)
    made = [list(tokens) for tokens in run_tracks_ahead(runner.execute, tracks, 16, NUM_TOKENS)]
    assert made == run_tracks(runner_for(mimo_path).execute, tracks_for(PROMPTS), 16, NUM_TOKENS)
    proposals = Proposals(lambda plan: runner.execute(dataclasses.replace(plan, step_id=100 + plan.step_id)))
    run_drafted(proposals, tracks, 16, NUM_TOKENS + 3, WANTED)
    expect_reference(MtpReference(mimo_path), proposals, tracks)


def test_a_shared_prefix_changes_no_tokens(mimo_path: Path) -> None:
    runner = runner_for(mimo_path)
    first, second = tracks_for([PROMPTS[1], [*PROMPTS[1][:16], 5, 6, 7]])
    run_drafted(Proposals(runner.execute), [first], 13, NUM_TOKENS, WANTED)
    alone = run_drafted(Proposals(runner_for(mimo_path).execute), [dataclasses.replace(second)], 13, NUM_TOKENS, WANTED)
    shared = dataclasses.replace(
        second, tokens=second.tokens[:19], made=[], blocks=first.blocks[:4] + second.blocks[4:], computed=16
    )
    assert run_drafted(Proposals(runner.execute), [shared], 13, NUM_TOKENS, WANTED) == alone


def test_only_the_rows_own_blocks_are_written(mimo_path: Path) -> None:
    runner = runner_for(mimo_path)
    cache = draft_head_of(runner)._cache
    assert cache is not None
    cache.k.fill_(7.0)
    cache.v.fill_(7.0)
    (track,) = tracks_for([list(range(60, 60 + 2 * BLOCK_SIZE))])  # its last block is full
    track.drafts_wanted = 8
    result = runner.execute(plan_step(0, [track], [2 * BLOCK_SIZE]))
    assert result is not None
    assert len(result.draft_tokens) == 8 * 4
    for tensor in (cache.k, cache.v):
        touched = {block for block in range(len(tensor)) if bool((tensor[block] != 7.0).any())}
        assert touched == {*track.blocks[:2], NUM_BLOCKS, NUM_BLOCKS + 1}, "behind NUM_BLOCKS are the spare blocks"


@pytest.mark.parametrize(("wanted", "logprobs", "num_kept"), [(WANTED, 0, WANTED), (0, 0, 1), (WANTED, -1, 0)])
def test_distributions_are_kept_for_one_step(mimo_path: Path, wanted: int, logprobs: int, num_kept: int) -> None:
    runner = runner_for(mimo_path)
    head = draft_head_of(runner)
    (track,) = tracks_for(PROMPTS[:1])
    track.drafts_wanted, track.logprobs = wanted, logprobs
    result = runner.execute(plan_step(0, [track], [5]))
    assert result is not None
    apply_step([track], [5], result.sampled)
    _, expected = MtpReference(mimo_path).drafts(track.tokens, WANTED)
    for ahead in range(num_kept):
        kept = head.log_q(track.seq_id, 1 + ahead)
        assert kept is not None
        torch.testing.assert_close(kept, expected[ahead], rtol=0, atol=1e-4)
    assert head.log_q(track.seq_id, 0) is None
    assert head.log_q(track.seq_id, 1 + num_kept) is None
    track.drafts_wanted, track.logprobs = 0, -1
    runner.execute(plan_step(1, [track], [1]))
    assert head.log_q(track.seq_id, 1) is None


def test_records_say_what_the_head_thought(often_right_path: Path) -> None:
    runner = runner_for(often_right_path)
    (track,) = tracks_for(PROMPTS[:1])
    track.drafts_wanted, track.logprobs = WANTED, 0
    first = runner.execute(plan_step(0, [track], [5]))
    assert first is not None
    (record,) = read_records(first.logprobs, 1)
    assert math.isnan(record.nextn_logprob)
    assert math.isnan(record.confidence), "nothing was predicted before the first step"
    apply_step([track], [5], first.sampled)
    drafts, log_q = MtpReference(often_right_path).drafts(track.tokens, WANTED)
    track.drafts = [drafts[0], 5, drafts[2]]
    second = runner.execute(plan_step(1, [track], [1]))
    assert second is not None
    sampled = np.frombuffer(second.sampled, np.int32)
    records = read_records(second.logprobs, 1 + WANTED)
    for index, record in enumerate(records[:WANTED]):
        assert record.nextn_logprob == pytest.approx(float(log_q[index, sampled[index]]), abs=1e-4)
        assert record.confidence == pytest.approx(float(log_q[index, track.drafts[index]].exp()), rel=1e-3)
    assert math.isnan(records[WANTED].nextn_logprob)
    assert math.isnan(records[WANTED].confidence)


def test_probabilities_are_those_of_the_formula(mimo_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Proposals` has it; here in float64, from the head's logits. The request's temperature has no part in it."""
    runner = runner_for(mimo_path)
    head = draft_head_of(runner)
    seen: list[Tensor] = []
    logits_of = head._model.logits

    def logits(hidden: Tensor) -> Tensor | None:
        made = logits_of(hidden)
        assert made is not None
        seen.append(made.clone())
        return made

    monkeypatch.setattr(head._model, "logits", logits)
    (track,) = tracks_for(PROMPTS[:1])
    track.drafts_wanted, track.logprobs, track.temperature, track.seed = WANTED, 0, 0.6, 4
    first = runner.execute(plan_step(0, [track], [5]))
    assert first is not None
    own = torch.cat(seen[1:]).numpy().astype(np.float64)  # the first are the model's, of the token sampled
    log_q = own - np.log(np.exp(own).sum(axis=1, keepdims=True))
    drafts = np.frombuffer(first.draft_tokens, np.int32)
    assert drafts.tolist() == log_q.argmax(axis=1).tolist()
    confidences = np.exp(log_q[np.arange(WANTED), drafts])
    np.testing.assert_allclose(np.frombuffer(first.draft_confidences, np.float32), confidences, rtol=1e-5)

    apply_step([track], [5], first.sampled)
    track.drafts = drafts.tolist()
    second = runner.execute(plan_step(1, [track], [1]))
    assert second is not None
    sampled = np.frombuffer(second.sampled, np.int32)[:WANTED]
    records = read_records(second.logprobs, 1 + WANTED)[:WANTED]
    expected = log_q[np.arange(WANTED), sampled]
    np.testing.assert_allclose([record.nextn_logprob for record in records], expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose([record.confidence for record in records], confidences, rtol=1e-5)


def test_a_row_without_a_token_gets_no_drafts(mimo_path: Path) -> None:
    ended, going = tracks_for(PROMPTS[:2])
    ended.banned = list(range(512))
    ended.drafts_wanted = going.drafts_wanted = WANTED
    result = runner_for(mimo_path).execute(plan_step(0, [ended, going], [5, 41]))
    assert result is not None
    assert np.frombuffer(result.num_drafts, np.int32).tolist() == [0, WANTED]
    assert len(result.draft_confidences) == WANTED * 4


def test_drafts_end_with_the_longest_sequence(mimo_path: Path) -> None:
    (track,) = tracks_for(PROMPTS[1:2])  # 41 tokens
    track.drafts_wanted = 5
    result = runner_for(mimo_path, max_model_len=43).execute(plan_step(0, [track], [41]))
    assert result is not None
    assert np.frombuffer(result.num_drafts, np.int32).tolist() == [3]  # read at positions 40, 41 and 42


def test_a_model_without_a_draft_head_is_refused(llama_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"LlamaForCausalLM has no draft head; set engine\.drafts\.method to"):
        runner_for(llama_path)


def test_the_heads_cache_is_counted_among_the_blocks(mimo_path: Path) -> None:
    def blocks_in_a_megabyte(**changes: object) -> int:
        runner = runner_for(mimo_path, kv_cache_bytes=2**20, num_kv_blocks_max=None, **changes)
        return runner.count_kv_blocks()

    layer_bytes = 2 * 2 * BLOCK_SIZE * 16 * 4  # keys and values, heads, tokens, dimensions, float32
    assert blocks_in_a_megabyte(draft_method="none") == 2**20 // (2 * layer_bytes)
    spare_bytes = 8 * 2 * layer_bytes  # for each of 8 sequences 7 tokens
    assert blocks_in_a_megabyte() == (2**20 - spare_bytes) // (3 * layer_bytes)


def draft_head_of(runner: ModelRunner) -> DraftHead:
    head = runner._drafter
    assert isinstance(head, DraftHead)
    return head
