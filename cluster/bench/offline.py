"""`airside bench offline`: the figures of `LLM`, beside what this machine's memory and arithmetic would allow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from airside.cluster.bench.figures import Figure, Load, figures_of, limits_of, measure_round
from airside.cluster.bench.machine import measure_limits_apart
from airside.cluster.bench.memory import peaks_here
from airside.cluster.bench.precision import precision_of
from airside.cluster.bench.progress import progress
from airside.cluster.bench.prompts import Prompts, make_prompts
from airside.cluster.bench.report import Chart, Column, Report, Table
from airside.cluster.bench.samples import median
from airside.cluster.model_source import resolve
from airside.cluster.offline.llm import LLM
from airside.cluster.sampling_params import SamplingParams
from airside.workers.model_config import ModelConfig, load_model_config

SPEED, MEMORY, START_UP = "Speed", "Peak memory", "Start-up"


class OfflineEngine:
    """`LLM` as something that is measured. Prefix caching is off unless it is asked for.

    Args:
        model: as `LLM` takes it.
        options: other arguments of `LLM`.
    """

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:  # Any: checked by the configuration
        began = time.perf_counter()
        self.llm = LLM(model, **{"enable_prefix_caching": False, **options})
        self.ready_s = time.perf_counter() - began

    def generate(self, prompts: Prompts, num_tokens: int) -> float:
        """The seconds it took. Raises RuntimeError when tokens are missing."""
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        began = time.perf_counter()
        outputs = self.llm.generate(prompts, params)
        seconds = time.perf_counter() - began
        short = [f"{each.finish_reason}: {each.detail}" for each in outputs if len(each.token_ids) != num_tokens]
        if short:
            raise RuntimeError(f"fewer tokens than asked: {short[0]}")
        return seconds


def bench_offline(model: str, load: Load, options: Mapping[str, Any], limit_seconds: float = 1.0) -> Report:
    """Measures.

    Args:
        options: arguments of `LLM` beside the model.
        limit_seconds: how long each of the machine's limits is looked for, before and after.
    """
    path = resolve(model, print)
    config = load_model_config(path)
    precision = precision_of(config, options)
    figures = figures_of(load)
    samples: dict[Figure, list[float]] = {figure: [] for figure in figures}
    start_up = Table(START_UP, [Column("start", "start"), Column("ready", "ready, s"), Column("parts", "rank 0, s")])
    with progress(load.rounds * len(figures) + 5) as advance:
        advance("loading the model, its weights packed anew")
        engine = OfflineEngine(str(path), {**options, "packed_cache": False})
        with engine.llm:
            _add_start(start_up, "weights packed anew", engine)
        advance("loading the model")
        engine = OfflineEngine(str(path), options)
        with engine.llm:
            _add_start(start_up, "as it is set", engine)
            advance("the machine's limits")
            limits = measure_limits_apart(precision.dtype, limit_seconds)
            advance("warming up")
            _warm_up(engine, load, config)
            for number in range(load.rounds):
                left = iter(figures)
                advance(_step(number, load, next(left)))
                for figure, value in measure_round(engine.generate, load, config.vocab_size, seed=number):
                    samples[figure].append(value)
                    following = next(left, None)
                    if following is not None:
                        advance(_step(number, load, following))
            controller_s = engine.llm.stats()["controller_step_s"]
            memory = peaks_here()
        advance("the machine's limits again")
        limits = limits.best(measure_limits_apart(precision.dtype, limit_seconds))
    reached = limits_of(load, config, precision, limits)
    return Report(
        f"airside bench offline: {model}, {precision}",
        {"model": model, **asdict(precision), "options": dict(options), **asdict(load)},
        [_speed(samples, reached), _memory(memory), start_up],
        [Chart(SPEED, "figure", "of_limit")],
        {figure.key: values for figure, values in samples.items()},
        limits,
        [
            f"{load.prompt_tokens} prompt and {load.output_tokens} output tokens, long prompt {load.prefill_tokens}; "
            f"median of {load.rounds}",
            f"controller's own work per step: {controller_s * 1e6:.0f} µs (median of its last 512 steps)",
            *precision.notes,
        ],
    )


def _add_start(table: Table, start: str, engine: OfflineEngine) -> None:
    """A row: until the engine took requests, and what of that rank 0 was at."""
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in engine.llm.start_up().items())
    table.add(start=start, ready=engine.ready_s, parts=parts)


def _warm_up(engine: OfflineEngine, load: Load, config: ModelConfig) -> None:
    engine.generate(make_prompts(max(load.num_requests), load.prompt_tokens, config.vocab_size, seed=-1), 2)


def _step(number: int, load: Load, figure: Figure) -> str:
    return f"round {number + 1} of {load.rounds}: {figure.label}"


def _speed(samples: dict[Figure, list[float]], reached: dict[Figure, float | None]) -> Table:
    columns = [
        Column("figure", "figure"),
        Column("value", "median"),
        Column("unit", "unit"),
        Column("best", "best"),
        Column("limit", "machine's limit"),
        Column("of_limit", "of the limit", 2),
    ]
    table = Table(SPEED, columns)
    for figure, values in samples.items():
        value, limit = median(values), reached[figure]
        table.add(
            figure=figure.label,
            value=value,
            unit=figure.unit,
            best=max(values) if figure.is_rate else min(values),
            limit=limit,
            of_limit=limit and (value / limit if figure.is_rate else limit / value),
        )
    return table


def _memory(peaks: dict[str, int]) -> Table:
    table = Table(MEMORY, [Column("process", "process"), Column("mib", "MiB", 0)])
    for module, peak in peaks.items():
        table.add(process=module, mib=peak / 2**20)
    table.add(process="together", mib=sum(peaks.values()) / 2**20)
    return table
