"""A recorded step gives the bits that `forward` gives; what cannot be recorded is computed by `forward`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from airside.proto.messages import StepPlan
from airside.workers.model_runner import ModelRunner
from airside.workers.step_batch import StepBatch, build_step_batch, read_rows
from airside.workers.step_program import StepProgram
from tests.checkpoints import (
    make_gemma3_text,
    make_idefics3,
    make_lfm2,
    make_llama,
    make_mimo,
    make_qwen2,
    make_qwen3,
)
from tests.workers.step_plans import BLOCK_SIZE, Track, lone_runner, plan_step, run_tracks, scattered_blocks

RECORDED: dict[str, Callable[..., Path]] = {
    "llama": make_llama,
    "qwen2": make_qwen2,
    "qwen3": make_qwen3,
    "gemma3": make_gemma3_text,
    "mimo": make_mimo,
    "idefics3": make_idefics3,
}
NUM_BLOCKS = 256
STEPS = [[40, 1, 17, 3], [1, 30, 1, 1], [1, 1, 1, 1], [5, 1, 2, 100]]
"""Tokens of each sequence in one step after another."""


@pytest.fixture(params=[1, 2, 3], ids=lambda count: f"{count} threads")
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def first_steps(num_seqs: int) -> tuple[StepPlan, StepBatch]:
    """A step of prompts of 7, 8, ... tokens from their beginning, whose last tokens are wanted."""
    blocks = scattered_blocks(num_seqs, 8)
    tracks = [Track(i, list(range(50 + i, 57 + 2 * i)), table) for i, table in enumerate(blocks)]
    plan = plan_step(0, tracks, [len(track.tokens) for track in tracks])
    return plan, build_step_batch(plan, read_rows(plan), BLOCK_SIZE, NUM_BLOCKS, torch.device("cpu"))


def final_states(runner: ModelRunner, program: StepProgram | None) -> list[torch.Tensor]:
    """The final states of all steps, from an empty cache on."""
    runner.allocate(NUM_BLOCKS)
    for cache in runner._cache:  # of earlier sequences nothing may be seen
        cache.k.fill_(float("nan"))
        cache.v.fill_(float("nan"))
    if program is None:
        runner._program = None
    rng = np.random.default_rng(3)
    blocks = scattered_blocks(len(STEPS[0]), 32)
    tokens = [rng.integers(100, 400, 200).tolist() for _ in blocks]
    tracks = [Track(i, own, table) for i, (own, table) in enumerate(zip(tokens, blocks, strict=True))]
    states = []
    for step_id, num_new in enumerate(STEPS):
        plan = plan_step(step_id, tracks, num_new)
        batch = build_step_batch(plan, read_rows(plan), BLOCK_SIZE, NUM_BLOCKS, torch.device("cpu"), all_wanted=True)
        with torch.inference_mode():
            states.append(runner._forward(runner._model.embed(batch.token_ids), batch).clone())
        for track, new in zip(tracks, num_new, strict=True):
            track.computed += new
    return states


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", RECORDED)
@pytest.mark.usefixtures("threads")
def test_bits_are_those_of_forward(tmp_path: Path, family: str, dtype: str) -> None:
    runner = lone_runner(RECORDED[family](tmp_path), NUM_BLOCKS, dtype=dtype)
    assert runner._program is not None
    recorded = final_states(runner, runner._program)
    computed = final_states(runner, None)
    assert all(torch.equal(a, b) for a, b in zip(recorded, computed, strict=True))
    assert not any(states.isnan().any() for states in recorded)


@pytest.mark.parametrize("threads", [5], indirect=True)
@pytest.mark.usefixtures("threads")
def test_helpers_take_the_right_tasks_however_they_are_interrupted(llama_path: Path) -> None:
    """More threads than cores, so that they lose theirs in the middle of a task, or between two operators."""
    runner = lone_runner(llama_path, NUM_BLOCKS)
    _, batch = first_steps(8)
    with torch.inference_mode():
        hidden = runner._model.embed(batch.token_ids)
        expected = runner._forward(hidden, batch).clone()
        assert all(torch.equal(runner._forward(hidden, batch), expected) for _ in range(300))


def test_operators_have_names_and_times(llama_path: Path) -> None:
    runner = lone_runner(llama_path, NUM_BLOCKS)
    program = runner.program
    assert program is not None
    layer = ["linear", "rotary_embedding", "kv_cache_write", "paged_attention", "linear", "add_rms_norm"]
    assert program.names[: 1 + len(layer)] == ["rms_norm", *layer]
    seconds = program.start_timing()
    plan, _ = first_steps(3)
    runner.execute(plan)
    assert (seconds > 0).all()
    program.stop_timing()
    timed = seconds.clone()
    runner.execute(dataclasses.replace(plan, step_id=1))
    assert torch.equal(seconds, timed)


def test_states_of_other_kinds_are_not_recorded(tmp_path: Path) -> None:
    assert lone_runner(make_lfm2(tmp_path), NUM_BLOCKS)._program is None


def test_another_operator_than_ours_is_not_recorded(
    llama_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would be computed once, while recording, and never again."""
    runner = lone_runner(llama_path, NUM_BLOCKS)
    forward = runner._model.forward
    monkeypatch.setattr(runner._model, "forward", lambda hidden, *rest: forward(hidden * 2, *rest), raising=False)
    caplog.set_level("INFO")
    runner.allocate(NUM_BLOCKS)
    assert runner._program is None
    assert "aten.mul" in caplog.text


@pytest.mark.parametrize(
    "copying", [lambda x: x.float().to(x.dtype), lambda x: x[:, :4].reshape(-1, 8)], ids=["to", "reshape"]
)
def test_what_only_looks_like_a_view_is_not_recorded(
    llama_path: Path, monkeypatch: pytest.MonkeyPatch, copying: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    runner = lone_runner(llama_path, NUM_BLOCKS, dtype="bfloat16")
    forward = runner._model.forward

    def copies_on_the_way(hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        copying(hidden)
        return forward(hidden, *rest)

    monkeypatch.setattr(runner._model, "forward", copies_on_the_way, raising=False)
    runner.allocate(NUM_BLOCKS)
    assert runner._program is None


def test_steps_of_one_token_are_recorded(tmp_path: Path) -> None:
    """Two heads of one token are as many rows as one token more is: they are told apart all the same."""
    path = make_qwen3(tmp_path, num_attention_heads=2, num_key_value_heads=2)
    runner = lone_runner(path, NUM_BLOCKS, max_num_batched_tokens=1)
    tokens = list(range(60, 70))
    alone = run_tracks(runner.execute, [Track(0, list(tokens), list(range(8)))], 1, 6)
    roomy = lone_runner(path, NUM_BLOCKS)
    assert alone == run_tracks(roomy.execute, [Track(0, list(tokens), list(range(8)))], 10, 6)


@pytest.mark.parametrize("shift", [506, -1])
def test_a_position_beyond_the_rotary_table_is_refused(llama_path: Path, shift: int) -> None:
    runner = lone_runner(llama_path, NUM_BLOCKS)
    assert runner._program is not None
    _, batch = first_steps(1)
    host = dataclasses.replace(batch.host, positions=batch.host.positions + np.int32(shift))
    beyond = dataclasses.replace(batch, host=host)
    with pytest.raises(AssertionError, match="rotary table"), torch.inference_mode():
        runner._program.run(runner._model.embed(batch.token_ids), beyond)


def test_a_step_that_is_too_large_is_refused(llama_path: Path) -> None:
    runner = lone_runner(llama_path, NUM_BLOCKS, max_num_batched_tokens=32)
    assert runner._program is not None
    with pytest.raises(ValueError, match="33 tokens"):
        runner._program.program.run(33, 1, 1)


def test_the_layers_share_their_memory(tmp_path: Path) -> None:
    """A tensor's place is used again when it is gone, so that twice as many layers take no more."""

    def workspace_bytes(num_layers: int) -> int:
        path = make_llama(tmp_path / str(num_layers), num_hidden_layers=num_layers)
        recorded = lone_runner(path, NUM_BLOCKS)._program
        assert recorded is not None
        return recorded.workspace_bytes

    assert workspace_bytes(2) == workspace_bytes(6)
