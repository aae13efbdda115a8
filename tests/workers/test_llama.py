"""Greedy tokens of the runner against transformers, whatever the chunks and the neighbours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from airside.workers.model_runner import ModelRunner
from tests.workers.step_plans import Track, lone_runner, plan_step, run_tracks, scattered_blocks

PROMPTS = [[7, 100, 200, 300, 5], list(range(60, 101)), [9], [11, 12] * 20]
NUM_TOKENS = 12


def runner_for(path: Path, **changes: object) -> ModelRunner:
    return lone_runner(path, 128, **changes)


def expected_tokens(path: Path, prompt: list[int], dtype: torch.dtype = torch.float32) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    out = model.generate(
        torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
    )
    return out[0, len(prompt) :].tolist()


def tracks_for(prompts: list[list[int]]) -> list[Track]:
    blocks = scattered_blocks(len(prompts), 16)
    return [Track(seq_id=i, tokens=list(p), blocks=b) for i, (p, b) in enumerate(zip(prompts, blocks, strict=True))]


def generate(runner: ModelRunner, tracks: list[Track], chunk: int) -> list[list[int]]:
    """Runs all tracks together; each computes at most `chunk` tokens per step until it has NUM_TOKENS new ones."""
    return run_tracks(runner.execute, tracks, chunk, NUM_TOKENS)


@pytest.mark.parametrize("checkpoint", ["llama_path", "untied_llama_path"])
@pytest.mark.parametrize("chunk", [3, 16, 512])
def test_mixed_batches_make_the_tokens_of_transformers(
    checkpoint: str, chunk: int, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(checkpoint)
    made = generate(runner_for(path), tracks_for(PROMPTS), chunk)
    assert made == [expected_tokens(path, prompt) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in made}) == len(PROMPTS), "the checkpoint is too uniform to show anything"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_do_not_depend_on_neighbours_or_chunks(llama_path: Path, dtype: str) -> None:
    together = generate(runner_for(llama_path, dtype=dtype), tracks_for(PROMPTS), 16)
    alone = [generate(runner_for(llama_path, dtype=dtype), tracks_for([prompt]), 512)[0] for prompt in PROMPTS]
    assert together == alone


def test_final_states_are_the_same_bits_in_any_company(llama_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        alone, beside = final_state(llama_path, dtype, PROMPTS[:1]), final_state(llama_path, dtype, PROMPTS)
        assert torch.equal(alone, beside), dtype


def final_state(path: Path, dtype: str, prompts: list[list[int]]) -> torch.Tensor:
    """The logits of the first prompt's last token, computed beside the other prompts."""
    runner = runner_for(path, dtype=dtype)
    seen: list[torch.Tensor] = []
    model = runner._model
    logits_of = model.logits

    def spy(hidden: torch.Tensor) -> torch.Tensor | None:
        logits = logits_of(hidden)
        assert logits is not None
        seen.append(logits[0].clone())
        return logits

    model.logits = spy  # type: ignore[method-assign]
    tracks = tracks_for(prompts)
    runner.execute(plan_step(0, tracks, [len(track.tokens) for track in tracks]))
    return seen[0]


def test_bfloat16_rounds_no_worse_than_transformers(llama_path: Path) -> None:
    def error(logits: torch.Tensor) -> float:
        return float((logits.float() - exact).norm() / exact.norm())

    exact = transformers_logits(llama_path, PROMPTS[1], torch.float32)
    theirs = error(transformers_logits(llama_path, PROMPTS[1], torch.bfloat16))
    ours = error(final_state(llama_path, "bfloat16", [PROMPTS[1]]))
    assert theirs > 0
    assert ours < 1.25 * theirs


def transformers_logits(path: Path, prompt: list[int], dtype: torch.dtype) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([prompt])).logits
    return logits[0, -1]


def test_banned_tokens_are_never_made(llama_path: Path) -> None:
    free = generate(runner_for(llama_path), tracks_for(PROMPTS[:2]), 16)
    tracks = tracks_for(PROMPTS[:2])
    tracks[1].banned = [free[1][0]]
    banned = generate(runner_for(llama_path), tracks, 16)
    assert free[1][0] not in banned[1]
    assert banned[0] == free[0]


def test_a_step_that_samples_nothing_answers_nothing(llama_path: Path) -> None:
    runner = runner_for(llama_path)
    tracks = tracks_for(PROMPTS[1:2])
    result = runner.execute(plan_step(0, tracks, [16]))
    assert result is not None
    assert result.sampled == b""
