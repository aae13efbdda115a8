"""Airside beside every peer that is installed, on one machine, in one run: `python benchmarks/compare.py [--quick]`.

All engines are loaded; within each round they take turns, and who goes first changes from round to round, so that a
slow minute of the machine hits all of them. Then the same with their servers. Prints one markdown table of medians with
ratios, and writes every measurement to bench-results/.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from peer import OURS, PEERS, Peer, PeerFailed, RunningPeer, free_port, running_server
from rich.console import Console
from text_model import write_text_model

from airside.cluster.bench import figures
from airside.cluster.bench.figures import Figure, Load, measure_round
from airside.cluster.bench.grpc_target import GrpcTarget
from airside.cluster.bench.http_target import HttpTarget
from airside.cluster.bench.plot import check_can_plot, plot
from airside.cluster.bench.progress import progress
from airside.cluster.bench.prompts import make_prompts
from airside.cluster.bench.report import Chart, Column, Report, Table
from airside.cluster.bench.samples import median
from airside.cluster.bench.serve import QUICK as SERVE_QUICK
from airside.cluster.bench.serve import ServeLoad, summary
from airside.cluster.bench.streams import Target, run_round
from airside.workers.model_config import ModelConfig, load_model_config

RESULTS = Path(__file__).resolve().parent.parent / "bench-results"
PEERS_FOLDER = Path(os.environ.get("AIRSIDE_PEERS", Path.home() / ".cache" / "airside" / "peers"))
BASE = "Side by side"

SERVED = {
    "output_per_s": Figure("served_output", "served, many streams: output", "tokens/s"),
    "first_p50_ms": Figure("served_first_p50", "served: time to first token, p50", "ms", is_rate=False),
    "first_p99_ms": Figure("served_first_p99", "served: time to first token, p99", "ms", is_rate=False),
    "gap_p50_ms": Figure("served_gap_p50", "served: between tokens, p50", "ms", is_rate=False),
    "gap_p99_ms": Figure("served_gap_p99", "served: between tokens, p99", "ms", is_rate=False),
}
MEMORY = Figure("memory", "peak resident memory", "MiB", is_rate=False)

Samples = dict[Figure, dict[str, list[float]]]


@dataclass(frozen=True, slots=True)
class Contest:
    """Who is compared, and with what."""

    folder: Path
    models: Path
    precision: str
    load: Load
    serve_load: ServeLoad
    options: dict[str, Any]  # Any: of `LLM`, for Airside
    config: ModelConfig
    samples: Samples = field(default_factory=dict)

    def command(self, peer: Peer) -> list[str]:
        """That starts one."""
        options = self.options if peer.name == OURS else {}
        return peer.command(self.folder, self.models / peer.model.format(self.precision), options)

    def add(self, figure: Figure, name: str, value: float) -> None:
        """One more measurement."""
        self.samples.setdefault(figure, {}).setdefault(name, []).append(value)


def main() -> int:
    """Measures, prints, writes; 0 unless nothing could be measured."""
    arguments = parse()
    if arguments.plot:
        check_can_plot(arguments.plot)
    models = arguments.peers / "models" / Path(arguments.model).name
    if not (models / "text" / "config.json").is_file():
        tell(f"writing the text part of {arguments.model} to {models / 'text'}")
        write_text_model(arguments.model, models / "text")
    load = figures.QUICK if arguments.quick else Load()
    serve_load = SERVE_QUICK if arguments.quick else ServeLoad()
    rounds = arguments.rounds or load.rounds
    contest = Contest(
        arguments.peers,
        models,
        arguments.precision,
        replace(load, rounds=rounds),
        replace(serve_load, rounds=rounds),
        dict(parse_option(option) for option in arguments.set),
        load_model_config(models / "text"),
    )
    peers = choose(contest, arguments.only.split(",") if arguments.only else None)
    try:
        with tempfile.TemporaryDirectory() as logs:
            if "offline" in arguments.parts:
                measure_engines(contest, peers, Path(logs))
            if "served" in arguments.parts:
                measure_servers(contest, [peer for peer in peers if peer.has_server], Path(logs))
    except KeyboardInterrupt:
        tell("interrupted: the table has what was measured until now")
    report = make_report(contest, [peer.name for peer in peers])
    report.show(Console())
    path = RESULTS / f"compare-{time.strftime('%Y%m%d-%H%M%S')}.json"
    report.write(path)
    tell(f"written to {path}")
    if arguments.plot:
        plot(report, arguments.plot)
    return 0 if contest.samples else 1


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help='"demo", a folder or a Hugging Face id; its text part is used')
    parser.add_argument("--peers", type=Path, default=PEERS_FOLDER, help="their folder; default: $AIRSIDE_PEERS")
    parser.add_argument("--only", metavar="NAME,NAME", help="of the peers that are installed")
    parser.add_argument("--parts", nargs="+", choices=("offline", "served"), default=["offline", "served"])
    parser.add_argument("--precision", default="bfloat16", help="of the peers' models, as their files are named")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an argument of Airside's LLM")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--quick", action="store_true", help="small and once: does it run, not how fast")
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


def parse_option(option: str) -> tuple[str, Any]:  # Any: what YAML has
    """KEY=VALUE."""
    key, _, value = option.partition("=")
    return key, yaml.safe_load(value)


def tell(line: str) -> None:
    """Progress, beside the table and not in it."""
    print(line, file=sys.stderr, flush=True)


def choose(contest: Contest, only: list[str] | None) -> list[Peer]:
    """Those that are installed and have a model to read; says why others are left out."""
    chosen = []
    for peer in PEERS:
        model = contest.models / peer.model.format(contest.precision)
        if only is not None and peer.name not in (*only, OURS):
            continue
        if not peer.is_installed(contest.folder):
            tell(f"{peer.name}: not installed at {peer.python(contest.folder)} (benchmarks/README.md says how)")
        elif not model.exists():
            tell(f"{peer.name}: no {model} (benchmarks/README.md says how to make it)")
        else:
            chosen.append(peer)
    return chosen


def turns(peers: list[Any], number: int) -> list[Any]:  # Any: peers, running or not
    """All of them, another first in each round."""
    first = number % max(1, len(peers))
    return peers[first:] + peers[:first]


def measure_engines(contest: Contest, peers: list[Peer], logs: Path) -> None:
    """All figures of `airside bench offline`, and memory."""
    load, vocab_size = contest.load, contest.config.vocab_size
    with contextlib.ExitStack() as opened, progress(len(peers) * (1 + load.rounds)) as advance:
        running = []
        for peer in peers:
            advance(f"loading {peer.name}")
            try:
                engine = RunningPeer(peer.name, contest.command(peer), logs / f"{peer.name}.log")
                opened.callback(engine.close)
                engine.generate(make_prompts(max(load.num_requests), load.prompt_tokens, vocab_size, seed=-1), 2)
                running.append(engine)
            except PeerFailed as error:
                tell(f"{peer.name} is left out: {error}")
        for number in range(load.rounds):
            for engine in turns(running, number):
                advance(f"round {number + 1} of {load.rounds}: {engine.name}")
                try:
                    for figure, value in measure_round(engine.generate, load, vocab_size, seed=number):
                        contest.add(figure, engine.name, value)
                except PeerFailed as error:
                    tell(f"{engine.name} goes on no longer: {error}")
                    running.remove(engine)
        for engine in running:
            contest.add(MEMORY, engine.name, engine.peak_rss_bytes() / 2**20)


def measure_servers(contest: Contest, peers: list[Peer], logs: Path) -> None:
    """All figures of `airside bench serve`, of those that have a server."""
    load = replace(contest.serve_load, vocab_size=contest.config.vocab_size)
    with contextlib.ExitStack() as opened, progress(len(peers) * (1 + load.rounds)) as advance:
        running: list[tuple[str, Target]] = []
        for peer in peers:
            advance(f"starting {peer.name}'s server")
            port = free_port()
            try:
                log = logs / f"{peer.name}-server.log"
                opened.enter_context(running_server(peer.name, contest.command(peer), port, log))
            except PeerFailed as error:
                tell(f"{peer.name}'s server is left out: {error}")
                continue
            address = f"127.0.0.1:{port}"
            target = GrpcTarget(address) if peer.name == OURS else HttpTarget(f"http://{address}/v1")
            asyncio.run(one_round(target, replace(load, output_tokens=2, requests=load.streams), seed=-1))
            running.append((peer.name, target))
        for number in range(load.rounds):
            for name, target in turns(running, number):
                advance(f"round {number + 1} of {load.rounds}: {name}'s server")
                found = asyncio.run(one_round(target, load, number))
                for key, figure in SERVED.items():
                    contest.add(figure, name, found[key])


async def one_round(target: Target, load: ServeLoad, seed: int) -> dict[str, float]:
    """A round of streams, summed up."""
    await target.open()
    try:
        prompts = make_prompts(load.requests, load.prompt_tokens, load.vocab_size, seed)
        return summary(await run_round(target, prompts, load.output_tokens, load.streams))
    finally:
        await target.close()


def make_report(contest: Contest, names: list[str]) -> Report:
    """Medians, and how many times better Airside is than the best of the others."""
    columns = [Column("figure", "figure"), Column("unit", "unit"), *(Column(name, name) for name in names)]
    table = Table(BASE, [*columns, Column("ratio", "Airside to the best peer", 2)])
    for figure, by_name in contest.samples.items():
        medians = {name: median(values) for name, values in by_name.items()}
        ratio = ratio_to_best(figure, medians)
        table.add(figure=figure.label, unit=figure.unit, ratio=ratio, **medians)
    load, served = contest.load, contest.serve_load
    return Report(
        f"Airside and peers: {contest.models.name}, {contest.precision}",
        {"load": asdict(load), "served": asdict(served), "options": contest.options},
        [table],
        [Chart(BASE, "figure", "ratio")],
        {f"{figure.key} {name}": each for figure, by in contest.samples.items() for name, each in by.items()},
        notes=[
            f"{load.prompt_tokens} prompt and {load.output_tokens} output tokens, long prompt {load.prefill_tokens}; "
            f"served: {served.streams} streams of {served.prompt_tokens} + {served.output_tokens}; greedy, prefix "
            f"caches off; medians of {load.rounds} interleaved rounds"
        ],
    )


def ratio_to_best(figure: Figure, medians: dict[str, float]) -> float | None:
    """Above 1: Airside is better than every other. None: there is nobody to compare."""
    others = [value for name, value in medians.items() if name != OURS]
    if OURS not in medians or not others:
        return None
    return medians[OURS] / max(others) if figure.is_rate else min(others) / medians[OURS]


if __name__ == "__main__":
    sys.exit(main())
