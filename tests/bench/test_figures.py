"""What is asked of an engine, and the limits that its figures are put beside."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from airside.cluster.bench.figures import (
    DECODE,
    FIRST_TOKEN,
    PREFILL,
    Figure,
    Load,
    count_weights,
    figures_of,
    limits_of,
    measure_round,
    together,
)
from airside.cluster.bench.machine import Limits
from airside.cluster.bench.precision import Precision
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


def known(limits: dict[Figure, float | None]) -> dict[Figure, float]:
    return {figure: limit for figure, limit in limits.items() if limit is not None}


def test_limits_are_those_of_memory_alone_and_of_arithmetic_together(tmp_path: Path) -> None:
    config = load_model_config(make_llama(tmp_path / "llama"))
    body, head = count_weights(config)
    bfloat16 = Precision("bfloat16")
    slow_memory = known(limits_of(LOAD, config, bfloat16, Limits(read_bytes_per_s=1e3, flop_per_s=1e15)))
    assert slow_memory[DECODE] == pytest.approx(1e3 / (2 * (body + head)))
    assert slow_memory[together(3)] == pytest.approx(3 * slow_memory[DECODE])
    slow_arithmetic = known(limits_of(LOAD, config, bfloat16, Limits(read_bytes_per_s=1e15, flop_per_s=1e3)))
    assert slow_arithmetic[PREFILL] == pytest.approx(20 * 1e3 / (2 * (20 * body + head)))
    assert slow_arithmetic[FIRST_TOKEN] == pytest.approx(2 * (10 * body + head))


def test_of_quantised_weights_only_reading_is_a_limit(tmp_path: Path) -> None:
    config = load_model_config(make_llama(tmp_path / "llama"))
    body, head = count_weights(config)
    slow_memory = Limits(read_bytes_per_s=1e3, flop_per_s=1e15)
    int8 = limits_of(LOAD, config, Precision("bfloat16", "int8"), slow_memory)
    assert int8[DECODE] == pytest.approx(1e3 / (body + head))
    slow_arithmetic = Limits(read_bytes_per_s=1e15, flop_per_s=1e3)
    for precision, limits in [("int8", slow_arithmetic), ("gguf", slow_memory), ("gguf", slow_arithmetic)]:
        found = limits_of(LOAD, config, Precision("float32", precision), limits)
        assert found.keys() == int8.keys()
        assert set(found.values()) == {None}


def test_a_kernel_reads_activations_too() -> None:
    limits = Limits(read_bytes_per_s=100.0, flop_per_s=100.0)
    assert Precision("float32").least_seconds(limits, 10, num_flop=1000, num_bytes=60) == 10.0
    assert Precision("float32").least_seconds(limits, 10, num_flop=10, num_bytes=60) == 1.0
    assert Precision("float32", "int8").least_seconds(limits, 10, num_flop=10, num_bytes=60) == 0.7
    assert Precision("float32", "int8").least_seconds(limits, 10, num_flop=71, num_bytes=60) is None


def test_a_precision_is_told_in_words() -> None:
    assert str(Precision("float32")) == "float32"
    assert str(Precision("bfloat16", "int8")) == "bfloat16, quantization int8"
