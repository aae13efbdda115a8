"""`airside bench`: measurements, and how they are shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from airside.cluster.cli.bench_options import (
    Context,
    Json,
    Model,
    Output,
    Plot,
    Prompt,
    Quick,
    Rounds,
    Settings,
    counts_of,
    llm_arguments,
    values_of,
)

if TYPE_CHECKING:
    from airside.cluster.bench.report import Report

app = typer.Typer(no_args_is_help=True, help="Measure the speed of models, servers, steps and operators.")


@app.command()
def offline(
    model: Model = "demo",
    prompt: Prompt = None,
    output: Output = None,
    requests: Annotated[str | None, typer.Option(metavar="N,N,...", help="How many at once: 1,32.")] = None,
    prefill: Annotated[int | None, typer.Option(min=0, help="Tokens of the one long prompt; 0: none.")] = None,
    rounds: Rounds = None,
    settings: Settings = None,
    quick: Quick = False,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """The offline LLM: first token, decoding, prefill, many requests at once, memory, beside the machine's limits."""
    _check(plot)
    from airside.cluster.bench import figures
    from airside.cluster.bench.offline import bench_offline

    load = _given(
        figures.QUICK if quick else figures.Load(),
        prompt_tokens=prompt,
        output_tokens=output,
        num_requests=counts_of("--requests", requests),
        prefill_tokens=prefill,
        rounds=rounds,
    )
    with _settings_checked():
        report = bench_offline(model, load, llm_arguments(settings), _limit_seconds(quick))
    _present(report, json, plot)


@app.command()
def drafts(
    model: Model = "demo",
    prompt: Prompt = None,
    output: Annotated[int | None, typer.Option(min=40, help="Tokens of an output.")] = None,
    rounds: Rounds = None,
    settings: Settings = None,
    quick: Quick = False,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Draft tokens by n-gram, with them and without in turns: on a text that repeats itself, and one that does not."""
    _check(plot)
    from airside.cluster.bench import drafts as bench

    load = _given(
        bench.QUICK if quick else bench.DraftsLoad(), prompt_tokens=prompt, output_tokens=output, rounds=rounds
    )
    with _settings_checked():
        report = bench.bench_drafts(model, load, llm_arguments(settings))
    _present(report, json, plot)


@app.command()
def serve(
    target: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="An Airside server, over gRPC.")] = None,
    url: Annotated[str | None, typer.Option(help="A server that speaks OpenAI's API: http://HOST:PORT/v1.")] = None,
    config: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A YAML file: its server is started and stopped.")
    ] = None,
    served_model: Annotated[str | None, typer.Option(help="The model's name behind --url; default: the first.")] = None,
    streams: Annotated[int | None, typer.Option(min=1, help="Requests at any time.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Requests of a round.")] = None,
    prompt: Prompt = None,
    output: Output = None,
    vocab: Annotated[int | None, typer.Option(min=300, help="Prompts are token ids below this.")] = None,
    rounds: Rounds = None,
    settings: Settings = None,
    quick: Quick = False,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """A server with many streams at once: throughput, time to the first token, gaps between tokens."""
    _check(plot)
    from airside.cluster.bench import serve as bench

    load = _given(
        bench.QUICK if quick else bench.ServeLoad(),
        streams=streams,
        requests=requests,
        prompt_tokens=prompt,
        output_tokens=output,
        vocab_size=vocab,
        rounds=rounds,
    )
    if sum(each is not None for each in (target, url, config)) != 1:
        raise typer.BadParameter("say which server: one of --target, --url and --config")
    if settings and config is None:
        raise typer.BadParameter("--set changes the server of --config; one that is up has its settings")
    if url is not None:
        from airside.cluster.bench.http_target import HttpTarget

        _present(bench.bench_serve(HttpTarget(url, served_model), url, load), json, plot)
        return
    from airside.cluster.bench.grpc_target import GrpcTarget

    if target is not None:
        _present(bench.bench_serve(GrpcTarget(target), target, load), json, plot)
        return
    assert config is not None
    with _server(config, settings or []) as address:
        report = bench.bench_serve(GrpcTarget(address), str(config), load)
    _present(report, json, plot)


@app.command()
def step(
    model: Model = "demo",
    rows: Annotated[str | None, typer.Option(metavar="N,N,...", help="Sequences that decode: 1,4,16,32,64.")] = None,
    context: Context = None,
    chunk: Annotated[int | None, typer.Option(min=2, help="Tokens of the step with a prompt.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Steps of each kind.")] = None,
    settings: Settings = None,
    quick: Quick = False,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """One model worker alone, without controller or bus: time per step, and where it goes."""
    _check(plot)
    from airside.cluster.bench import step as bench

    load = _given(
        bench.QUICK if quick else bench.StepLoad(),
        rows=counts_of("--rows", rows),
        context_tokens=context,
        chunk_tokens=chunk,
        repeats=repeats,
    )
    with _settings_checked():
        report = bench.bench_step(model, load, values_of(settings), _limit_seconds(quick))
    _present(report, json, plot)


@app.command()
def kernels(
    model: Model = "demo",
    rows: Annotated[str | None, typer.Option(metavar="N,N,...", help="Rows of a call: 1,4,16,64,512.")] = None,
    context: Context = None,
    settings: Settings = None,
    quick: Quick = False,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Every operator at the model's shapes: time, bytes and operations per second."""
    _check(plot)
    from airside.cluster.bench import kernels as bench

    load = _given(bench.QUICK if quick else bench.KernelLoad(), rows=counts_of("--rows", rows), context_tokens=context)
    with _settings_checked():
        report = bench.bench_kernels(model, load, values_of(settings), _limit_seconds(quick))
    _present(report, json, plot)


def _given(defaults: Any, **values: Any) -> Any:  # Any: one of the loads
    """The defaults, but for what was said."""
    return replace(defaults, **{name: value for name, value in values.items() if value is not None})


def _limit_seconds(quick: bool) -> float:
    return 0.02 if quick else 1.0


@contextmanager
def _settings_checked() -> Iterator[None]:
    """Within, a setting that the configuration does not take is the user's to understand."""
    from pydantic import ValidationError

    try:
        yield
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        raise typer.BadParameter("; ".join(problems), param_hint="--set") from error


def _check(plot: Path | None) -> None:
    if plot is not None:
        from airside.cluster.bench.plot import check_can_plot

        check_can_plot(plot)


def _present(report: Report, json: Path | None, picture: Path | None) -> None:
    from rich.console import Console

    report.show(Console())
    if json is not None:
        report.write(json)
        typer.echo(f"written to {json}", err=True)
    if picture is not None:
        from airside.cluster.bench.plot import plot

        plot(report, picture)
        typer.echo(f"drawn to {picture}", err=True)


@contextmanager
def _server(config: Path, settings: list[str]) -> Iterator[str]:
    """A server of its own, on a free port; yields its address."""
    from airside.cluster.cli.server_states import server_states
    from airside.cluster.runs.detached import start_detached
    from airside.cluster.runs.down import down
    from airside.cluster.runs.up import CannotStart

    states = server_states()
    overrides = [*settings, "server.grpc.port=0", "server.metrics.port=0"]
    arguments = [str(config), *(word for override in overrides for word in ("--set", override))]
    state = start_detached(arguments, 0, states, _tell)
    if state is None:
        raise CannotStart(f"the server of {config} did not start; what it said is above")
    try:
        yield state.address
    finally:
        down(states, [state], _tell)


def _tell(line: str) -> None:
    typer.echo(line, err=True)
