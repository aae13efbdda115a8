"""Sequences with a grammar in the steps of a runner, beside others, with drafts and with steps planned ahead."""

from __future__ import annotations

import dataclasses
import re
import select
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from airside.proto.messages import GrammarReady, StepPlan, StepResult
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

PATTERNS = [r"(ab|cd|e[0-9]){20}", r"[0-9]{40}", None]
NUM_TOKENS = 10


@pytest.fixture(scope="module")
def runner(llama_path: Path) -> ModelRunner:
    return lone_runner(llama_path, 128)


def open_grammar(runner: ModelRunner, seq_id: int, pattern: str) -> None:
    assert runner.grammars is not None
    runner.grammars.open(seq_id, LLMatcher.grammar_from_regex(pattern), b"")
    assert select.select([runner.grammars.wake_fd], [], [], 30.0)[0]
    assert runner.grammars.poll() == [GrammarReady(seq_id)]


def tracks(runner: ModelRunner) -> list[Track]:
    blocks = scattered_blocks(len(PATTERNS), 16)
    made = [Track(i, [40 + i, 90, 200], table, seed=i, temperature=1.0) for i, table in enumerate(blocks)]
    made[1].rules = Rules(frequency_penalty=1.5)
    for track, pattern in zip(made, PATTERNS, strict=True):
        if pattern is not None:
            track.structured = True
            open_grammar(runner, track.seq_id, pattern)
    return made


@pytest.fixture(scope="module")
def plain(runner: ModelRunner) -> list[list[int]]:
    return [run_tracks(runner.execute, [track], 512, NUM_TOKENS)[0] for track in tracks(runner)]


def test_the_text_begins_as_its_grammar_says(plain: list[list[int]], llama_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(llama_path / "tokenizer.json"))
    texts = [tokenizer.decode(tokens) for tokens in plain]
    assert re.fullmatch(r"(ab|cd|e[0-9])*(a|c|e)?", texts[0])
    assert re.fullmatch(r"[0-9]+", texts[1])
    assert len(set(texts[1])) > 1, "the checkpoint is too uniform to show anything"
    assert not re.fullmatch(r"[0-9a-e]+", texts[2])


def test_neighbours_and_planning_ahead_change_nothing(runner: ModelRunner, plain: list[list[int]]) -> None:
    assert run_tracks(runner.execute, tracks(runner), 2, NUM_TOKENS) == plain
    assert run_tracks_ahead(runner.execute, tracks(runner), 2, NUM_TOKENS) == plain


@pytest.mark.parametrize("spoilt", [None, 0, 1, 2])
def test_drafts_change_nothing(runner: ModelRunner, plain: list[list[int]], spoilt: int | None) -> None:
    def propose(track: Track) -> list[int]:
        drafts = plain[track.seq_id][len(track.made) : len(track.made) + 3]
        return [300 if index == spoilt else token for index, token in enumerate(drafts)]

    assert run_tracks(runner.execute, tracks(runner), 512, NUM_TOKENS, propose=propose) == plain


def sampled_by(runner: ModelRunner, plan: StepPlan) -> list[int]:
    result: StepResult | None = runner.execute(plan)
    assert result is not None
    tokens: list[int] = np.frombuffer(result.sampled, np.int32).tolist()
    return tokens


def test_what_is_banned_or_not_allowed_may_leave_the_grammar_nothing(runner: ModelRunner, llama_path: Path) -> None:
    [four] = Tokenizer.from_file(str(llama_path / "tokenizer.json")).encode("4").ids
    own = tracks(runner)
    own[1].rules = Rules(allowed_token_ids=[four, 300])
    plan = plan_step(0, own, [3, 3, 3])
    assert sampled_by(runner, plan)[1] == four
    banned = plan_step(0, tracks(runner), [3, 3, 3])
    everything = list(range(512))
    tokens = sampled_by(runner, dataclasses.replace(banned, banned={1: everything, 2: everything}))
    assert tokens[1:] == [-2, -1], "the grammar left none; none had a probability"
