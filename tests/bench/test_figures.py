"""What is asked of an engine, and the limits that its figures are put beside."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from airside.cluster.bench.figures import (
    DECODE,
    FIRST_TOKEN,
    PREFILL,
    Load,
    count_weights,
    figures_of,
    limits_of,
    measure_round,
    together,
)
from airside.cluster.bench.machine import Limits
from airside.cluster.bench.prompts import Prompts
from airside.workers.model_config import load_model_config
from tests.checkpoints import make_llama

LOAD = Load(prompt_tokens=10, output_tokens=5, num_requests=(1, 3), prefill_tokens=20, rounds=2)


class FakeEngine:
    """Takes a second for each prompt token and two for each token after the first."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int]] = []
        self.prompts: list[tuple[int, ...]] = []

    def generate(self, prompts: Prompts, num_tokens: int) -> float:
        self.asked.append((len(prompts), len(prompts[0]), num_tokens))
        self.prompts += map(tuple, prompts)
        return float(sum(map(len, prompts)) + 2 * (num_tokens - 1))


def test_figures_come_from_the_times_of_calls() -> None:
    engine = FakeEngine()
    found = dict(measure_round(engine.generate, LOAD, vocab_size=512, seed=0))
    assert list(found) == figures_of(LOAD)
    assert found == {FIRST_TOKEN: 10_000.0, DECODE: 0.5, PREFILL: 1.0, together(3): pytest.approx(15 / 38)}
    assert engine.asked == [(1, 10, 1), (1, 10, 5), (1, 20, 1), (3, 10, 5)]


def test_no_prompt_is_sent_twice() -> None:
    engine = FakeEngine()
    for seed in range(2):
        list(measure_round(engine.generate, LOAD, vocab_size=512, seed=seed))
    assert len(set(engine.prompts)) == len(engine.prompts) == 12


def test_weights_are_counted_as_the_checkpoint_has_them(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "llama")
    body, head = count_weights(load_model_config(path))
    model = AutoModelForCausalLM.from_pretrained(path)
    matrices = [parameter for name, parameter in model.model.layers.named_parameters() if parameter.ndim == 2]
    assert body == sum(matrix.numel() for matrix in matrices)
    assert head == model.lm_head.weight.numel()


def test_limits_are_those_of_memory_alone_and_of_arithmetic_together(tmp_path: Path) -> None:
    config = load_model_config(make_llama(tmp_path / "llama"))
    body, head = count_weights(config)
    slow_memory = limits_of(LOAD, config, 2, Limits(read_bytes_per_s=1e3, flop_per_s=1e15))
    assert slow_memory[DECODE] == pytest.approx(1e3 / (2 * (body + head)))
    assert slow_memory[together(3)] == pytest.approx(3 * slow_memory[DECODE])
    slow_arithmetic = limits_of(LOAD, config, 2, Limits(read_bytes_per_s=1e15, flop_per_s=1e3))
    assert slow_arithmetic[PREFILL] == pytest.approx(20 * 1e3 / (2 * (20 * body + head)))
    assert slow_arithmetic[FIRST_TOKEN] == pytest.approx(2 * (10 * body + head))
