"""A draft head led by the engine core: the same tokens with it and without, in fewer steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from airside._core import EngineConfig, Request
from airside.workers.model_runner import ModelRunner
from tests.checkpoints import make_mimo
from tests.workers.engine_loop import run_engine
from tests.workers.step_plans import BLOCK_SIZE, lone_runner

SHARED = list(range(60, 90))  # several blocks
PROMPTS = [[7, 100, 200, 300, 5], [*SHARED, 7], [*SHARED, 8, 9], [9], [11, 12] * 10, SHARED]
NUM_TOKENS = 14
DRAFTS_MAX = 4


@pytest.fixture(scope="module", params=[0.0, 0.02, None], ids=["always-right", "often-right", "wrong"])
def mimo_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mimo(tmp_path_factory.mktemp("mimo"), context=request.param)


def runner_for(path: Path, num_blocks: int, draft_method: str) -> ModelRunner:
    drafts_max = DRAFTS_MAX if draft_method != "none" else 0
    changes: dict[str, object] = {"draft_method": draft_method, "max_draft_tokens": drafts_max, "max_model_len": 64}
    return lone_runner(path, num_blocks, **changes)


def config_for(num_blocks: int, draft_method: str, **changes: object) -> EngineConfig:
    values: dict[str, object] = {
        "num_blocks": num_blocks,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 24,
        "max_model_len": 64,
        "draft_method": draft_method,
        "max_draft_tokens": DRAFTS_MAX if draft_method != "none" else 0,
        "vocab_size": 512,
        **changes,
    }
    return EngineConfig(**values)  # type: ignore[arg-type]


def requests() -> list[Request]:
    """Every other one samples, and one takes no drafts."""
    return [
        Request(
            client=0,
            seq_id=1 + index,
            token_ids=np.array(prompt, np.int32).tobytes(),
            arrival=float(index),
            max_tokens=NUM_TOKENS,
            temperature=float(index % 2),
            seed=index,
            drafts_max=0 if index == 3 else None,
        )
        for index, prompt in enumerate(PROMPTS)
    ]


def tokens_of_each_alone(path: Path) -> dict[int, list[int]]:
    runner, config = runner_for(path, 64, "none"), config_for(64, "none", enable_prefix_caching=False)
    tokens: dict[int, list[int]] = {}
    for request in requests():
        tokens |= run_engine(runner, config, [request]).tokens
    return tokens


@pytest.mark.parametrize("draft_method", ["mtp", "ngram"])
@pytest.mark.parametrize("num_blocks", [64, 20])
def test_drafted_tokens_are_those_of_each_request_alone(mimo_path: Path, draft_method: str, num_blocks: int) -> None:
    runner = runner_for(mimo_path, num_blocks, draft_method)
    outcome = run_engine(runner, config_for(num_blocks, draft_method), requests())
    assert outcome.tokens == tokens_of_each_alone(mimo_path)
    assert set(outcome.reasons.values()) == {"length"}
    assert outcome.num_cached > 0
    if num_blocks == 20:
        assert outcome.num_preemptions > 0


def test_right_drafts_save_steps(tmp_path: Path) -> None:
    path = make_mimo(tmp_path, context=0.0)
    greedy = [request for request in requests() if request.seq_id % 2 == 1]
    plain = run_engine(runner_for(path, 64, "none"), config_for(64, "none"), greedy)
    drafted = run_engine(runner_for(path, 64, "mtp"), config_for(64, "mtp"), greedy)
    assert drafted.tokens == plain.tokens
    assert drafted.num_accepted == drafted.num_drafted > 0
    assert drafted.num_steps < plain.num_steps
