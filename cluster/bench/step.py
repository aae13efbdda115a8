"""`airside bench step`: one model worker's time per step, and where it goes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from airside.cluster.bench.figures import count_weights
from airside.cluster.bench.lone_rank import LoneRank, check_room, worker_settings
from airside.cluster.bench.machine import measure_limits
from airside.cluster.bench.precision import Precision
from airside.cluster.bench.progress import progress
from airside.cluster.bench.report import Chart, Column, Report, Table
from airside.cluster.bench.samples import median
from airside.workers import ops

STEPS, SHARES = "Steps", "Where the time goes"
_OPERATIONS_SHOWN = 12


@dataclass(frozen=True, slots=True)
class StepLoad:
    """Which steps are measured."""

    rows: tuple[int, ...] = (1, 4, 16, 32, 64)
    """Sequences that decode one token each."""
    context_tokens: int = 128
    """What each has in the cache before."""
    chunk_tokens: int = 512
    """Of one prompt, with nothing before it."""
    repeats: int = 20
    profiled_steps: int = 10


QUICK = StepLoad(rows=(1, 4), context_tokens=16, chunk_tokens=32, repeats=2, profiled_steps=1)


def bench_step(model: str, load: StepLoad, values: Mapping[str, Any], limit_seconds: float = 1.0) -> Report:
    """Measures.

    Args:
        values: keys of the YAML file, block by block.
    """
    config, settings = worker_settings(model, values)
    most = max(load.rows)
    kinds = [*((rows, load.context_tokens, 1) for rows in load.rows), (1, 0, load.chunk_tokens)]
    for rows, computed, new in kinds:
        check_room(settings, rows, computed, new)
    body, head = count_weights(config)
    precision = Precision(settings.dtype, settings.quantization)
    table = Table(STEPS, _COLUMNS)
    shares = Table(SHARES, _SHARE_COLUMNS)
    samples: dict[str, list[float]] = {}
    with progress(2 * len(kinds) + 3) as advance:
        advance("loading the model")
        rank = LoneRank(config, settings, most + 1, max(load.context_tokens + 1, load.chunk_tokens))
        advance("filling the cache")
        for row in range(most):
            for start in range(0, load.context_tokens, settings.max_num_batched_tokens):
                rank.step(1, start, min(settings.max_num_batched_tokens, load.context_tokens - start), first_seq=row)
        advance("the machine's limits")
        limits = measure_limits(settings.dtype, limit_seconds)
        for rows, computed, new in kinds:
            advance(f"{rows} rows of {new} tokens")
            first_seq = 0 if new == 1 else most
            rank.step(rows, computed, new, first_seq)
            took = [rank.step(rows, computed, new, first_seq) for _ in range(load.repeats)]
            least = precision.least_seconds(limits, body + head, 2 * rows * (new * body + head))
            samples[f"step_s_{rows}_rows_{new}_tokens"] = took
            table.add(
                kind="decode" if new == 1 else "prompt",
                rows=rows,
                tokens=rows * new,
                ms=median(took) * 1e3,
                best_ms=min(took) * 1e3,
                tokens_per_s=rows * new / median(took),
                of_limit=least and least / median(took),
            )
        for rows, computed, new in kinds:
            advance(f"where the time goes: {rows} rows of {new} tokens")
            first_seq = 0 if new == 1 else most
            for share in _shares(rank, (rows, computed, new, first_seq), load.profiled_steps):
                shares.add(step=f"{rows} x {new}", **share)
    return Report(
        f"airside bench step: {model}, {precision}, {settings.num_threads} threads",
        {"model": model, **asdict(precision), "values": dict(values), **asdict(load)},
        [table, shares],
        [Chart(STEPS, "kind", "ms", over="tokens")],
        samples,
        limits,
        [
            f"decoding rows have {load.context_tokens} tokens in the cache; median of {load.repeats} steps",
            *precision.notes,
        ],
    )


_COLUMNS = [
    Column("kind", "step"),
    Column("rows", "rows"),
    Column("tokens", "tokens"),
    Column("ms", "median ms", 2),
    Column("best_ms", "best ms", 2),
    Column("tokens_per_s", "tokens/s"),
    Column("of_limit", "of the limit", 2),
]
_SHARE_COLUMNS = [
    Column("step", "rows x tokens"),
    Column("operation", "operation"),
    Column("calls", "calls per step"),
    Column("ms", "ms per step", 3),
    Column("share", "share", 2),
]


def _shares(rank: LoneRank, step: tuple[int, int, int, int], num_steps: int) -> Iterator[dict[str, Any]]:
    """The operations that take longest, by what each takes itself; Python in between is a row of its own."""
    with _timed_program(rank) as recorded, _named_kernels(), profile(activities=[ProfilerActivity.CPU]) as profiler:
        total_s = sum(rank.step(*step) for _ in range(num_steps))
    found = {each.key: (each.count, each.self_cpu_time_total / 1e6) for each in profiler.key_averages()}
    for name, (calls, seconds) in recorded().items():  # the profiler does not see these; they have a clock of their own
        others = found.get(name, (0, 0.0))
        found[name] = calls * num_steps + others[0], seconds + others[1]
    ranked = sorted(((name, *each) for name, each in found.items() if each[1] > 0), key=lambda row: -row[2])
    in_operations_s = sum(seconds for _, _, seconds in ranked)
    rows = ranked[:_OPERATIONS_SHOWN]
    rows.append(("other operations", 0, in_operations_s - sum(seconds for _, _, seconds in rows)))
    rows.append(("between operations", 0, max(0.0, total_s - in_operations_s)))
    for name, count, seconds in rows:
        per_step = count / num_steps if count else None
        yield {"operation": name, "calls": per_step, "ms": seconds / num_steps * 1e3, "share": seconds / total_s}


@contextlib.contextmanager
def _timed_program(rank: LoneRank) -> Iterator[Callable[[], dict[str, tuple[int, float]]]]:
    """Within, the operators of the recorded step are timed. Yields what tells calls per step and seconds of each."""
    program = rank.program
    seconds = program.start_timing() if program is not None else torch.zeros(0)

    def by_name() -> dict[str, tuple[int, float]]:
        found: dict[str, tuple[int, float]] = {}
        for name, each in zip(program.names if program is not None else [], seconds.tolist(), strict=True):
            calls, sum_s = found.get(f"airside::{name}", (0, 0.0))
            found[f"airside::{name}"] = calls + 1, sum_s + each
        return found

    try:
        yield by_name
    finally:
        if program is not None:
            program.stop_timing()


class _NamedKernels:
    """The kernels' library, whose calls the profiler sees by name."""

    def __init__(self, library: Any) -> None:  # Any: as in ops
        self._library = library

    def __getattr__(self, name: str) -> Any:  # Any: a function of the library
        kernel = getattr(self._library, name)

        def named(*arguments: Any) -> Any:  # Any: the kernel's
            with record_function(f"airside::{name}"):
                return kernel(*arguments)

        return named


@contextlib.contextmanager
def _named_kernels() -> Iterator[None]:
    """Within, every kernel that `ops` calls is known to torch's profiler."""
    known = ops._kernels
    with patch.object(ops, "_kernels", lambda tensor: _NamedKernels(known(tensor))), torch.inference_mode():
        yield
