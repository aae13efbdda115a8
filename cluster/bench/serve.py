"""`airside bench serve`: many streams at once against a server that is up."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass

from airside.cluster.bench.progress import progress
from airside.cluster.bench.prompts import make_prompts
from airside.cluster.bench.report import Chart, Column, Report, Table
from airside.cluster.bench.samples import median, percentile
from airside.cluster.bench.streams import Round, Target, gaps_of, run_round

THROUGHPUT, LATENCY = "Throughput", "Latency"


@dataclass(frozen=True, slots=True)
class ServeLoad:
    """What the clients ask for."""

    streams: int = 16
    requests: int = 48
    prompt_tokens: int = 256
    output_tokens: int = 64
    rounds: int = 3
    vocab_size: int = 49_152
    """Prompts are token ids below this."""


QUICK = ServeLoad(streams=2, requests=4, prompt_tokens=16, output_tokens=8, rounds=1, vocab_size=512)

_FIGURES = {
    THROUGHPUT: {"output_per_s": "output, tokens/s", "requests_per_s": "requests/s"},
    LATENCY: {
        "first_p50_ms": "time to first token, p50",
        "first_p99_ms": "time to first token, p99",
        "gap_p50_ms": "between tokens, p50",
        "gap_p99_ms": "between tokens, p99",
    },
}
"""By table: figures by their keys in `summary`."""


def bench_serve(target: Target, name: str, load: ServeLoad) -> Report:
    """Measures. Raises TargetError or grpc.RpcError."""
    rounds = asyncio.run(_rounds(target, load))
    each = [summary(one) for one in rounds]
    tables = []
    for name_of_table, figures in _FIGURES.items():
        heading = "median" if name_of_table == THROUGHPUT else "median, ms"
        table = Table(name_of_table, [Column("figure", "figure"), Column("value", heading)])
        for key, label in figures.items():
            table.add(figure=label, value=median([one[key] for one in each]))
        tables.append(table)
    streams = [stream for one in rounds for stream in one.streams]
    early = sum(stream.num_tokens != load.output_tokens for stream in streams)
    notes = [
        f"{load.streams} streams, {load.requests} requests, {load.prompt_tokens} prompt and {load.output_tokens} "
        f"output tokens; median of {load.rounds}"
    ]
    if early:
        notes.append(f"{early} of {len(streams)} requests did not make {load.output_tokens} tokens")
    samples = {key: [one[key] for one in each] for key in each[0]}
    samples |= {"first_s": [stream.first_s for stream in streams], "gaps_s": gaps_of(streams)}
    return Report(
        f"airside bench serve: {name}",
        {"target": name, **asdict(load)},
        tables,
        [Chart(LATENCY, "figure", "value")],
        samples,
        notes=notes,
    )


async def _rounds(target: Target, load: ServeLoad) -> list[Round]:
    await target.open()
    try:
        with progress(load.rounds + 1) as advance:
            advance("warming up")
            warm = make_prompts(load.streams, load.prompt_tokens, load.vocab_size, seed=-1)
            await run_round(target, warm, 2, load.streams)
            rounds = []
            for number in range(load.rounds):
                advance(f"round {number + 1} of {load.rounds}: {load.streams} streams")
                prompts = make_prompts(load.requests, load.prompt_tokens, load.vocab_size, seed=number)
                rounds.append(await run_round(target, prompts, load.output_tokens, load.streams))
        return rounds
    finally:
        await target.close()


def summary(one: Round) -> dict[str, float]:
    """The figures of a round, by their keys in JSON. Outputs of one token have no gaps; then those are 0."""
    first = [stream.first_s * 1e3 for stream in one.streams]
    gaps = [gap * 1e3 for gap in gaps_of(one.streams)] or [0.0]
    return {
        "output_per_s": one.output_per_s,
        "requests_per_s": len(one.streams) / one.seconds,
        "first_p50_ms": percentile(first, 50),
        "first_p99_ms": percentile(first, 99),
        "gap_p50_ms": percentile(gaps, 50),
        "gap_p99_ms": percentile(gaps, 99),
    }
