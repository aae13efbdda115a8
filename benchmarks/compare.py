"""Airside beside every peer that is installed, on one machine, in one run: `python benchmarks/compare.py [--quick]`.

All engines are loaded; within each round they take turns, and who goes first changes from round to round, so that a
slow minute of the machine hits all of them. Then the same with their servers. One that fails is left out from then on.
Prints one markdown table of medians with ratios, and writes every measurement to bench-results/.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import yaml
from peer import ANSWER_S, CHECKPOINT_PRECISION, OURS, PEERS, Peer, PeerFailed, RunningPeer, free_port, running_server
from rich.console import Console
from text_model import TextModelError, tell, text_model

from airside.cluster.bench import figures
from airside.cluster.bench.figures import Figure, Load, measure_round
from airside.cluster.bench.grpc_target import GrpcTarget
from airside.cluster.bench.http_target import HttpTarget
from airside.cluster.bench.plot import check_can_plot, plot
from airside.cluster.bench.precision import Precision
from airside.cluster.bench.progress import progress
from airside.cluster.bench.prompts import make_prompts
from airside.cluster.bench.report import Chart, Column, Report, Table
from airside.cluster.bench.samples import median
from airside.cluster.bench.serve import QUICK as SERVE_QUICK
from airside.cluster.bench.serve import ServeLoad, summary
from airside.cluster.bench.streams import Target, TargetError, run_round
from airside.cluster.model_source import ModelSourceError
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

FAILURES = (PeerFailed, TargetError, grpc.RpcError, OSError)
"""Of one engine, which the others need not suffer for."""


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
    answer_s: float = ANSWER_S
    samples: Samples = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """Why, by who."""

    def command(self, peer: Peer) -> list[str]:
        """That starts one."""
        options = self.options if peer.name == OURS else {}
        return peer.command(self.folder, self.model_of(peer), options)

    def model_of(self, peer: Peer) -> Path:
        """What it reads: Airside too, where it is to use a .gguf file as it is, llama.cpp's."""
        reads_gguf = peer.name == OURS and self.options.get("quantization") == "gguf"
        return self.models / ("{}.gguf" if reads_gguf else peer.model).format(self.precision)

    def add(self, figure: Figure, name: str, value: float) -> None:
        """One more measurement."""
        self.samples.setdefault(figure, {}).setdefault(name, []).append(value)

    def leave_out(self, who: str, error: BaseException) -> None:
        """Says that one is not measured any more, and why."""
        why = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else str(error)
        self.left_out[who] = why or type(error).__name__
        tell(f"{who} is left out from here on: {self.left_out[who]}")

    def precision_of(self, peer: Peer) -> str:
        """What it computes with, in words."""
        if peer.name == OURS:
            dtype, quantization = (self.options.get(*each) for each in [("dtype", "auto"), ("quantization", "none")])
            return str(Precision(CHECKPOINT_PRECISION if dtype == "auto" else dtype, quantization))
        own = peer.bfloat16 if self.precision == "bfloat16" else self.precision
        return f"{own}, {peer.remark}" if peer.remark else own


def main() -> int:
    """Measures, prints, writes; 0 unless nothing could be measured."""
    arguments = parse()
    if arguments.plot:
        check_can_plot(arguments.plot)
    models = arguments.peers / "models" / Path(arguments.model).name
    only = names_of(arguments.only)
    try:
        text_model(arguments.model, models / "text")
    except (TextModelError, ModelSourceError) as error:
        sys.exit(str(error))
    config = load_model_config(models / "text")
    load = figures.QUICK if arguments.quick else Load()
    serve_load = SERVE_QUICK if arguments.quick else ServeLoad()
    rounds = arguments.rounds or load.rounds
    contest = Contest(
        arguments.peers,
        models,
        arguments.precision,
        replace(load, rounds=rounds),
        replace(serve_load, rounds=rounds, vocab_size=config.vocab_size),
        dict(parse_option(option) for option in arguments.set),
        config,
        arguments.answer_s,
    )
    peers = choose(contest, only)
    try:
        with tempfile.TemporaryDirectory() as logs:
            if "offline" in arguments.parts:
                measure_engines(contest, peers, Path(logs))
            if "served" in arguments.parts:
                measure_servers(contest, [peer for peer in peers if peer.has_server], Path(logs))
    except KeyboardInterrupt:
        tell("interrupted: the table has what was measured until now")
    report = make_report(contest, peers)
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
    parser.add_argument(
        "--answer-s", type=float, default=ANSWER_S, help="what takes an engine longer, loading or one call, has failed"
    )
    parser.add_argument("--quick", action="store_true", help="small and once: does it run, not how fast")
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


def parse_option(option: str) -> tuple[str, Any]:  # Any: what YAML has
    """KEY=VALUE."""
    key, _, value = option.partition("=")
    return key, yaml.safe_load(value)


def names_of(only: str | None) -> list[str] | None:
    """NAME,NAME; None: all. Exits when there is no such peer."""
    names = only.split(",") if only else None
    known = [peer.name for peer in PEERS]
    unknown = [name for name in names or [] if name not in known]
    if unknown:
        sys.exit(f"--only: no peer is called {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def choose(contest: Contest, only: list[str] | None) -> list[Peer]:
    """Those that are installed and have a model to read; says why others are left out."""
    chosen = []
    for peer in PEERS:
        model = contest.model_of(peer)
        if only is not None and peer.name not in (*only, OURS):
            continue
        if not peer.has_precision(contest.precision):
            tell(f"{peer.name}: computes in {CHECKPOINT_PRECISION} only, not in {contest.precision}")
        elif not peer.is_installed(contest.folder):
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
        running: list[RunningPeer] = []
        for peer in peers:
            advance(f"loading {peer.name}")
            try:
                log = logs / f"{peer.name}.log"
                engine = RunningPeer(peer.name, contest.command(peer), log, contest.answer_s)
                opened.callback(engine.close)
                running.append(engine)
                engine.generate(make_prompts(max(load.num_requests), load.prompt_tokens, vocab_size, seed=-1), 2)
            except FAILURES as error:
                drop(contest, running, peer.name, error)
        for number in range(load.rounds):
            for engine in turns(running, number):
                advance(f"round {number + 1} of {load.rounds}: {engine.name}")
                try:
                    for figure, value in measure_round(engine.generate, load, vocab_size, seed=number):
                        contest.add(figure, engine.name, value)
                except FAILURES as error:
                    drop(contest, running, engine.name, error)
        for engine in list(running):
            try:
                contest.add(MEMORY, engine.name, engine.peak_rss_bytes() / 2**20)
            except FAILURES as error:
                drop(contest, running, engine.name, error)


@dataclass(frozen=True, slots=True)
class RunningServer:
    """Of a peer."""

    name: str
    target: Target
    close: Callable[[], None]


def drop(contest: Contest, running: list[Any], name: str, error: BaseException) -> None:  # Any: peers or their servers
    """One has failed: the others have the machine to themselves."""
    for each in [each for each in running if each.name == name]:
        running.remove(each)
        with contextlib.suppress(*FAILURES):
            each.close()
    contest.leave_out(name, error)


def start_server(contest: Contest, peer: Peer, log: Path) -> RunningServer:
    """Raises one of FAILURES."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    target = GrpcTarget(address) if peer.name == OURS else HttpTarget(f"http://{address}/v1")
    opened = contextlib.ExitStack()
    opened.enter_context(running_server(peer.name, contest.command(peer), port, log))
    try:
        load = replace(contest.serve_load, output_tokens=2, requests=contest.serve_load.streams)
        asyncio.run(one_round(target, load, seed=-1))
    except BaseException:  # an interrupt too
        opened.close()
        raise
    return RunningServer(f"{peer.name}'s server", target, opened.close)


def measure_servers(contest: Contest, peers: list[Peer], logs: Path) -> None:
    """All figures of `airside bench serve`, of those that have a server."""
    load = contest.serve_load
    with contextlib.ExitStack() as opened, progress(len(peers) * (1 + load.rounds)) as advance:
        running: list[RunningServer] = []
        names: dict[str, str] = {}
        for peer in peers:
            server = f"{peer.name}'s server"
            advance(f"starting {server}")
            try:
                running.append(start_server(contest, peer, logs / f"{peer.name}-server.log"))
                opened.callback(running[-1].close)
                names[server] = peer.name
            except FAILURES as error:
                drop(contest, running, server, error)
        for number in range(load.rounds):
            for each in turns(running, number):
                advance(f"round {number + 1} of {load.rounds}: {each.name}")
                try:
                    found = asyncio.run(one_round(each.target, load, number))
                except FAILURES as error:
                    drop(contest, running, each.name, error)
                    continue
                for key, figure in SERVED.items():
                    contest.add(figure, names[each.name], found[key])


async def one_round(target: Target, load: ServeLoad, seed: int) -> dict[str, float]:
    """A round of streams, summed up. Raises TargetError, when outputs are shorter than asked too; grpc.RpcError."""
    await target.open()
    try:
        prompts = make_prompts(load.requests, load.prompt_tokens, load.vocab_size, seed)
        done = await run_round(target, prompts, load.output_tokens, load.streams)
    finally:
        await target.close()
    least = min(stream.num_tokens for stream in done.streams)
    if least < load.output_tokens:
        raise TargetError(f"asked for {load.output_tokens} tokens, one answer has {least}")
    return summary(done)


def make_report(contest: Contest, peers: list[Peer]) -> Report:
    """Medians, and how many times better Airside is than the best of the others."""
    columns = [Column("figure", "figure"), Column("unit", "unit"), *(Column(peer.name, peer.name) for peer in peers)]
    table = Table(BASE, [*columns, Column("ratio", "Airside to the best peer", 2)])
    for figure, by_name in contest.samples.items():
        medians = {name: median(values) for name, values in by_name.items()}
        ratio = ratio_to_best(figure, medians)
        table.add(figure=figure.label, unit=figure.unit, ratio=ratio, **medians)
    load, served = contest.load, contest.serve_load
    precisions = {peer.name: contest.precision_of(peer) for peer in peers}
    return Report(
        f"Airside ({precisions.get(OURS, 'not measured')}) and peers ({contest.precision}): {contest.models.name}",
        {
            "load": asdict(load),
            "served": asdict(served),
            "options": contest.options,
            "precisions": precisions,
            "left_out": contest.left_out,
        },
        [table],
        [Chart(BASE, "figure", "ratio")],
        {f"{figure.key} {name}": each for figure, by in contest.samples.items() for name, each in by.items()},
        notes=[
            f"{load.prompt_tokens} prompt and {load.output_tokens} output tokens, long prompt {load.prefill_tokens}; "
            f"served: {served.streams} streams of {served.prompt_tokens} + {served.output_tokens}; greedy, no two "
            f"prompts alike; medians of {load.rounds} interleaved rounds",
            "precision: " + "; ".join(f"{name}: {words}" for name, words in precisions.items()),
            *missing_rounds(contest),
        ],
    )


def missing_rounds(contest: Contest) -> list[str]:
    """Who was measured less often than the others, or not at all."""
    wanted = {**dict.fromkeys(contest.samples, contest.load.rounds), MEMORY: 1}
    fewer: dict[str, list[str]] = {}
    for figure, by_name in contest.samples.items():
        for name, values in by_name.items():
            if len(values) < wanted[figure]:
                fewer.setdefault(name, []).append(f"{figure.key} {len(values)}")
    notes = [f"{name} has fewer than {contest.load.rounds} rounds: {', '.join(few)}" for name, few in fewer.items()]
    for who, why in contest.left_out.items():
        notes.append(f"{who} was left out: {why.splitlines()[0].rstrip(':')}")
    return notes


def ratio_to_best(figure: Figure, medians: dict[str, float]) -> float | None:
    """Above 1: Airside is better than every other. None: there is nobody to compare."""
    others = [value for name, value in medians.items() if name != OURS]
    if OURS not in medians or not others:
        return None
    return medians[OURS] / max(others) if figure.is_rate else min(others) / medians[OURS]


if __name__ == "__main__":
    sys.exit(main())
