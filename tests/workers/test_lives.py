"""What the engine core does to sequences changes no token of models that look back or keep a state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from airside._core import EngineConfig, Request
from airside.workers.engram import primes_up_to
from airside.workers.load import load_runner
from airside.workers.model_runner import ModelRunner
from airside.workers.parallel import RankGroup
from airside.workers.pixels import PixelArena
from tests.checkpoints import add_engram, make_lfm2, make_llama
from tests.workers.engine_loop import Outcome, run_engine
from tests.workers.step_plans import BLOCK_SIZE, worker_settings

NUM_BLOCKS, NUM_TOKENS, MAX_DRAFTS = 64, 20, 3
ENGRAM = {"layers": [0, 1], "table_size": 211, "num_heads": 2, "dim": 8, "max_ngram": 3, "seed": 7}
RNG = np.random.default_rng(11)
SHARED = RNG.integers(60, 512, 17).tolist()
PROMPTS = [
    *([*SHARED, *RNG.integers(60, 512, length).tolist()] for length in (1, 6, 13)),
    [11, 12] * 9,
    SHARED[:12],
    [9],
    SHARED,
]


@pytest.fixture(scope="module", params=["lfm2", "engram"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    path: Path = tmp_path_factory.mktemp(request.param)
    if request.param == "lfm2":
        make_lfm2(path)
    else:
        make_llama(path, seed=4)
        add_engram(path, 128, sum(primes_up_to(211, 4)), ENGRAM)
    settings = worker_settings(str(path), max_draft_tokens=MAX_DRAFTS)
    return load_runner(settings, RankGroup(0, 1), PixelArena())


def serve(
    runner: ModelRunner,
    prompts: list[list[int]],
    num_blocks: int = NUM_BLOCKS,
    golden: dict[int, list[int]] | None = None,
    **changes: Any,
) -> Outcome:
    """All prompts at once, NUM_TOKENS each, greedily.

    Args:
        golden: the tokens to draft, of which four in ten are spoilt.
        changes: EngineConfig values that differ.
    """
    values = {
        "num_blocks": num_blocks,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 11,
        "max_model_len": 200,
        "num_state_slots": runner.num_state_slots,
        "tail_tokens": runner._config.tail_tokens,
    }
    runner.allocate(num_blocks)
    requests = [
        Request(
            client=0,
            seq_id=index,
            request_id=str(index),
            token_ids=np.array(prompt, np.int32).tobytes(),
            image_positions=[],
            arrival=0.0,
            priority=0,
            deadline=None,
            max_tokens=NUM_TOKENS,
            min_tokens=0,
            stop_token_ids=[],
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=index,
            **({} if golden is None else drafted(golden[index])),
        )
        for index, prompt in enumerate(prompts)
    ]
    return run_engine(runner, EngineConfig(**{**values, **changes}), requests)


def drafted(tokens: list[int]) -> dict[str, Any]:
    """Values of a request that drafts these tokens."""
    golden_tokens = np.array(tokens, np.int32).tobytes()
    return {"golden_tokens": golden_tokens, "golden_mode": "draft", "golden_acceptance": 0.6}


@pytest.fixture(scope="module")
def alone(runner: ModelRunner) -> dict[int, list[int]]:
    """Each prompt by itself, whole, one step after the other, nothing cached."""
    plain = {"async_scheduling": False, "enable_prefix_caching": False, "max_num_batched_tokens": 64}
    made = {index: serve(runner, [prompt], **plain).tokens[0] for index, prompt in enumerate(PROMPTS)}
    assert len({tuple(tokens) for tokens in made.values()}) > 3, "the checkpoint is too uniform to show anything"
    return made


@pytest.mark.parametrize("num_blocks", [NUM_BLOCKS, 16])
@pytest.mark.parametrize("ahead", [False, True], ids=["in_turn", "ahead"])
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafted"])
def test_any_schedule_makes_the_tokens_of_one_alone(
    runner: ModelRunner, alone: dict[int, list[int]], num_blocks: int, ahead: bool, drafts: bool
) -> None:
    golden, limit = (alone, MAX_DRAFTS) if drafts else (None, 0)
    outcome = serve(runner, PROMPTS, num_blocks, golden, async_scheduling=ahead, max_draft_tokens=limit)
    assert outcome.tokens == alone
    assert set(outcome.reasons.values()) == {"length"}
    assert outcome.num_cached > 0
    assert (outcome.num_preemptions > 0) == (num_blocks < NUM_BLOCKS)
    if drafts:
        assert 0 < outcome.num_accepted < outcome.num_drafted


def test_fewer_slots_than_sequences_change_no_token(runner: ModelRunner, alone: dict[int, list[int]]) -> None:
    assert serve(runner, PROMPTS, num_state_slots=min(2, runner.num_state_slots)).tokens == alone
