"""`airside bench kernels`: each operator at a model's shapes, beside what the machine's memory and arithmetic allow.

Weights and caches are read from memory, as a model reads them: each case has as many copies as it takes to be larger
than any cache, and they are used in turn. Activations stay in the caches, as they do between two layers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from airside.cluster.bench.lone_rank import NotMeasurable, worker_settings
from airside.cluster.bench.machine import Limits, measure_limits
from airside.cluster.bench.precision import Precision
from airside.cluster.bench.progress import progress
from airside.cluster.bench.report import Chart, Column, Report, Table
from airside.cluster.bench.samples import median
from airside.workers import ops
from airside.workers.linear import make_linear
from airside.workers.model_config import ModelConfig

KERNELS = "Operators"
_COPIES_BYTES = 128 * 2**20
_COPIES_MAX = 64


@dataclass(frozen=True, slots=True)
class KernelLoad:
    """How the operators are called."""

    rows: tuple[int, ...] = (1, 4, 16, 64, 512)
    context_tokens: int = 512
    """Of every sequence of `paged_attention`, whose rows decode one token each."""
    block_size: int = 16
    seconds_each: float = 0.2


QUICK = KernelLoad(rows=(1, 4), context_tokens=32, seconds_each=0.005)


@dataclass(frozen=True, slots=True)
class Case:
    """One call: how to make it, and what it has to read and compute at the least."""

    prepare: Callable[[], Callable[[], object]]
    """Makes operands that no other call has, and returns the call."""
    num_bytes: float
    """Without weights."""
    num_flop: float = 0.0
    num_weights: int = 0
    is_cold: bool = False
    """Most of the bytes come from memory, not from a cache."""

    def moved(self, precision: Precision) -> float:
        """Bytes, weights included."""
        return self.num_bytes + self.num_weights * (precision.weight_bytes or 0)

    def least_seconds(self, precision: Precision, limits: Limits) -> float | None:
        """By the machine's limits. None: not known, as where bytes come from a cache."""
        own = precision if self.num_weights else Precision(precision.dtype)
        return own.least_seconds(limits, self.num_weights, self.num_flop, self.num_bytes) if self.is_cold else None


@dataclass(frozen=True, slots=True)
class Shapes:
    """A model, a precision and a load: all that a case is made of."""

    model: ModelConfig
    precision: Precision
    load: KernelLoad

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, and of weights before they are quantised."""
        dtype: torch.dtype = getattr(torch, self.precision.dtype)
        return dtype

    @property
    def weight_format(self) -> str | None:
        """As `make_linear` takes it."""
        return None if self.precision.quantization == "none" else self.precision.quantization

    def random(self, *shape: int) -> Tensor:
        """In the model's dtype."""
        return torch.randn(shape).to(self.dtype)

    def num_bytes(self, *counts: int) -> int:
        """Of so many elements."""
        return sum(counts) * self.dtype.itemsize


def _linear(out_features: int, in_features: int) -> Callable[[Shapes, int], Case]:
    def case(s: Shapes, rows: int) -> Case:
        def prepare() -> Callable[[], object]:
            linear = make_linear(s.random(out_features, in_features), weight_format=s.weight_format)
            x = s.random(rows, in_features)
            return lambda: linear(x)

        moved, weights = s.num_bytes(rows * (out_features + in_features)), out_features * in_features
        return Case(prepare, moved, 2 * rows * weights, weights, is_cold=True)

    return case


def _rms_norm(s: Shapes, rows: int) -> Case:
    x, weight = s.random(rows, s.model.hidden_size), s.random(s.model.hidden_size)
    return Case(lambda: lambda: ops.rms_norm(x, weight, 1e-5), s.num_bytes(2 * x.numel()))


def _add_rms_norm(s: Shapes, rows: int) -> Case:
    x, residual = s.random(rows, s.model.hidden_size), s.random(rows, s.model.hidden_size)
    weight = s.random(s.model.hidden_size)
    return Case(lambda: lambda: ops.add_rms_norm(x, residual, weight, 1e-5), s.num_bytes(4 * x.numel()))


def _rotary_embedding(s: Shapes, rows: int) -> Case:
    q, k = s.random(rows, s.model.num_heads, s.model.head_dim), s.random(rows, s.model.num_kv_heads, s.model.head_dim)
    cos, sin = torch.ones(rows, s.model.head_dim // 2), torch.zeros(rows, s.model.head_dim // 2)
    positions = torch.arange(rows, dtype=torch.int32)
    moved = s.num_bytes(2 * q.numel(), 2 * k.numel()) + 4 * 2 * cos.numel()
    return Case(lambda: lambda: ops.rotary_embedding(q, k, positions, cos, sin), moved)


def _silu_and_mul(s: Shapes, rows: int) -> Case:
    gate_up = s.random(rows, 2 * s.model.intermediate_size)
    return Case(lambda: lambda: ops.silu_and_mul(gate_up), s.num_bytes(3 * gate_up.numel() // 2))


def _cache_shape(s: Shapes, rows: int) -> tuple[int, int, int, int]:
    blocks_each = -(-s.load.context_tokens // s.load.block_size)
    return rows * blocks_each, s.model.num_kv_heads, s.load.block_size, s.model.head_dim


def _kv_cache_write(s: Shapes, rows: int) -> Case:
    shape = _cache_shape(s, rows)
    k, v = (s.random(rows, s.model.num_kv_heads, s.model.head_dim) for _ in range(2))
    k_cache, v_cache = s.random(*shape), s.random(*shape)
    slots = torch.arange(rows) * (shape[0] // rows * s.load.block_size)
    return Case(lambda: lambda: ops.kv_cache_write(k, v, k_cache, v_cache, slots), s.num_bytes(4 * k.numel()))


def _paged_attention(s: Shapes, rows: int) -> Case:
    shape, context = _cache_shape(s, rows), s.load.context_tokens
    tables = torch.arange(shape[0], dtype=torch.int32).view(rows, -1)
    starts, lens = torch.arange(rows + 1, dtype=torch.int32), torch.full((rows,), context, dtype=torch.int32)
    scale = s.model.head_dim**-0.5

    def prepare() -> Callable[[], object]:
        q, k_cache, v_cache = s.random(rows, s.model.num_heads, s.model.head_dim), s.random(*shape), s.random(*shape)
        return lambda: ops.paged_attention(q, k_cache, v_cache, tables, starts, lens, scale)

    moved = s.num_bytes(2 * rows * context * s.model.num_kv_heads * s.model.head_dim)
    return Case(prepare, moved, 4.0 * rows * context * s.model.num_heads * s.model.head_dim, is_cold=True)


def _sample(s: Shapes, rows: int) -> Case:
    logits = torch.randn(rows, s.model.vocab_size)
    temperature, min_p, top_p = torch.full((rows,), 0.8), torch.zeros(rows), torch.full((rows,), 0.95)
    top_k, seed = torch.full((rows,), 50, dtype=torch.int32), torch.arange(rows)
    position = torch.zeros(rows, dtype=torch.int64)
    call = lambda: ops.sample(logits, temperature, top_k, top_p, min_p, seed, position)  # noqa: E731
    return Case(lambda: call, 4 * logits.numel())


def _token_logprobs(s: Shapes, rows: int) -> Case:
    logits, targets = torch.randn(rows, s.model.vocab_size), torch.zeros(rows, dtype=torch.int32)
    return Case(lambda: lambda: ops.token_logprobs(logits, targets, 5), 4 * logits.numel())


def operators(model: ModelConfig) -> dict[str, Callable[[Shapes, int], Case]]:
    """Every operator by its name; a new one is a line here and its case above."""
    q_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    hidden, inner = model.hidden_size, model.intermediate_size
    return {
        "linear, query key value": _linear(q_size + 2 * kv_size, hidden),
        "linear, attention out": _linear(hidden, q_size),
        "linear, gate and up": _linear(2 * inner, hidden),
        "linear, down": _linear(hidden, inner),
        "linear, head": _linear(model.vocab_size, hidden),
        "rms_norm": _rms_norm,
        "add_rms_norm": _add_rms_norm,
        "rotary_embedding": _rotary_embedding,
        "kv_cache_write": _kv_cache_write,
        "paged_attention": _paged_attention,
        "silu_and_mul": _silu_and_mul,
        "sample": _sample,
        "token_logprobs": _token_logprobs,
    }


def bench_kernels(model: str, load: KernelLoad, values: Mapping[str, Any], limit_seconds: float = 1.0) -> Report:
    """Measures, in this process.

    Args:
        values: keys of the YAML file, block by block: the model's dtype and quantization, the engine's threads.
    Raises:
        NotMeasurable: the weights' formats are those of a file, which is not read here; and as `worker_settings`.
    """
    config, settings = worker_settings(model, values)
    if settings.quantization == "gguf":
        raise NotMeasurable(
            "model.quantization is gguf, but operators are measured with weights that are made up; set it to none or "
            "int8, or measure the file's own with `airside bench step`"
        )
    torch.set_num_threads(settings.num_threads)
    precision = Precision(settings.dtype, settings.quantization)
    shapes = Shapes(config, precision, load)
    cases = list(itertools.product(operators(config).items(), load.rows))
    table, samples = Table(KERNELS, _COLUMNS), {}
    with torch.inference_mode(), progress(len(cases) + 1) as advance:
        advance("the machine's limits")
        limits = measure_limits(settings.dtype, limit_seconds)
        for (name, make), rows in cases:
            advance(f"{name}, {rows} rows")
            case = make(shapes, rows)
            moved, least_s = case.moved(precision), case.least_seconds(precision, limits)
            took = list(_seconds_per_call(case, moved, load.seconds_each))
            seconds = median(took)
            samples[f"{name}, {rows} rows"] = took
            table.add(
                operator=name,
                rows=rows,
                us=seconds * 1e6,
                best_us=min(took) * 1e6,
                gb_per_s=moved / seconds / 1e9,
                gflop_per_s=case.num_flop / seconds / 1e9 if case.num_flop else None,
                of_limit=least_s and least_s / seconds,
            )
    return Report(
        f"airside bench kernels: {model}, {precision}, {settings.num_threads} threads",
        {"model": model, **asdict(precision), "values": dict(values), **asdict(load)},
        [table],
        [Chart(KERNELS, "operator", "us", over="rows")],
        samples,
        limits,
        [
            f"paged_attention: rows that decode, {load.context_tokens} tokens each; medians over {load.seconds_each} s",
            *precision.notes,
        ],
    )


_COLUMNS = [
    Column("operator", "operator"),
    Column("rows", "rows"),
    Column("us", "median µs"),
    Column("best_us", "best µs"),
    Column("gb_per_s", "GB/s"),
    Column("gflop_per_s", "GFLOP/s"),
    Column("of_limit", "of the limit", 2),
]


def _seconds_per_call(case: Case, moved: float, seconds: float) -> Iterator[float]:
    """Of one batch after the other, for so long; a batch calls every copy once, and lasts long enough for the clock."""
    copies = min(_COPIES_MAX, int(_COPIES_BYTES // moved) + 1) if case.is_cold else 1
    calls = [case.prepare() for _ in range(copies)]
    once = _time(calls)
    calls *= max(1, int(0.001 / max(once, 1e-9)))
    until = time.perf_counter() + seconds
    yield _time(calls) / len(calls)
    while time.perf_counter() < until:
        yield _time(calls) / len(calls)


def _time(calls: list[Callable[[], object]]) -> float:
    began = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - began
