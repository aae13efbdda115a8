"""Qwen2, Qwen3 and MiMo's trunk against transformers: logits, and greedy tokens in any chunks on one rank and two."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen2ForCausalLM, Qwen3ForCausalLM

from airside.workers.load import load_runner
from airside.workers.model_config import CheckpointError, load_model_config
from airside.workers.model_runner import ModelRunner
from airside.workers.parallel import RankGroup
from airside.workers.pixels import PixelArena
from tests.checkpoints import make_mimo, make_qwen2, make_qwen3
from tests.workers.ranks import start_ranks
from tests.workers.step_plans import Track, plan_step, run_tracks, scattered_blocks, worker_settings

PROMPTS = [[7, 100, 200, 300, 5], list(range(60, 101)), [9]]
NUM_TOKENS = 10

MAKERS: dict[str, tuple[Callable[[Path], Path], type[Qwen2ForCausalLM] | type[Qwen3ForCausalLM]]] = {
    "qwen2-tied": (make_qwen2, Qwen2ForCausalLM),
    "qwen2-untied": (lambda path: make_qwen2(path, tied=False, seed=1, rope_theta=640_000.0), Qwen2ForCausalLM),
    "qwen3-tied": (make_qwen3, Qwen3ForCausalLM),
    "qwen3-untied": (lambda path: make_qwen3(path, tied=False, seed=1, attention_bias=True), Qwen3ForCausalLM),
    "mimo": (make_mimo, Qwen2ForCausalLM),
}


@pytest.fixture(scope="module", params=MAKERS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, object]:
    """A checkpoint's path, and transformers' model of it."""
    make, model_class = MAKERS[request.param]
    path = make(tmp_path_factory.mktemp(request.param))
    # An architecture that transformers does not know is loaded by the class that it extends.
    return path, model_class.from_pretrained(path, dtype=torch.float32)


def tracks_for(prompts: list[list[int]]) -> list[Track]:
    blocks = scattered_blocks(len(prompts), 16)
    return [Track(i, list(prompt), table) for i, (prompt, table) in enumerate(zip(prompts, blocks, strict=True))]


def runner_for(path: Path) -> ModelRunner:
    runner = load_runner(worker_settings(str(path)), RankGroup(0, 1), PixelArena())
    runner.allocate(128)
    return runner


def expected_tokens(model: Qwen2ForCausalLM, prompt: list[int]) -> list[int]:
    out = model.generate(
        torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize("chunk", [3, 512])
def test_tokens_are_those_of_transformers(checkpoint: tuple[Path, Qwen2ForCausalLM], chunk: int) -> None:
    path, model = checkpoint
    made = run_tracks(runner_for(path).execute, tracks_for(PROMPTS), chunk, NUM_TOKENS)
    assert made == [expected_tokens(model, prompt) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in made}) == len(PROMPTS), "the checkpoint is too uniform to show anything"


def test_logits_are_those_of_transformers(checkpoint: tuple[Path, Qwen2ForCausalLM]) -> None:
    path, model = checkpoint
    runner = runner_for(path)
    seen: list[torch.Tensor] = []
    logits_of = runner._model.logits

    def spy(hidden: torch.Tensor) -> torch.Tensor | None:
        logits = logits_of(hidden)
        assert logits is not None
        seen.append(logits.clone())
        return logits

    runner._model.logits = spy  # type: ignore[method-assign]
    tracks = tracks_for(PROMPTS)
    runner.execute(plan_step(0, tracks, [len(track.tokens) for track in tracks]))
    for ours, prompt in zip(seen[0], PROMPTS, strict=True):
        with torch.inference_mode():
            theirs = model(torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_two_ranks_make_the_same_tokens(checkpoint: tuple[Path, Qwen2ForCausalLM]) -> None:
    path, model = checkpoint
    with tempfile.TemporaryDirectory(prefix="airside-test-") as folder, start_ranks(path, Path(folder), 2) as ranks:
        ranks.set_up(num_blocks=48)
        made = ranks.generate(tracks_for(PROMPTS), chunk=16, num_tokens=NUM_TOKENS)
        assert ranks.shut_down() == [0, 0]
    assert made == [expected_tokens(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("change", "is_refused"),
    [
        ({"use_sliding_window": True, "max_window_layers": 1, "layer_types": None}, True),
        ({"layer_types": ["full_attention", "sliding_attention"]}, True),
        ({"use_sliding_window": True, "max_window_layers": 2, "layer_types": None}, False),
        ({"use_sliding_window": False, "max_window_layers": 0, "layer_types": None}, False),
    ],
)
def test_sliding_windows_are_refused(tmp_path: Path, change: dict[str, object], is_refused: bool) -> None:
    make_qwen2(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    if is_refused:
        with pytest.raises(CheckpointError, match="sliding window attention is not supported"):
            load_model_config(tmp_path)
    else:
        assert load_model_config(tmp_path).attention_bias
