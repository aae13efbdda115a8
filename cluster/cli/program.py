"""The command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from airside.cluster.cli import bench
from airside.cluster.cli import generate_options as options

if TYPE_CHECKING:
    from airside.cluster.sampling_params import SamplingParams

app = typer.Typer(no_args_is_help=True, add_completion=False, help="A distributed model server.")
config_app = typer.Typer(no_args_is_help=True, help="Configuration files.")
scale_app = typer.Typer(no_args_is_help=True, help="Change the number of processes while serving.")
app.add_typer(config_app, name="config")
app.add_typer(scale_app, name="scale")
app.add_typer(bench.app, name="bench")

FAILURE = 1
EXAMPLE = Path(__file__).parents[1] / "local.yaml"

ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="YAML configuration file.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override engine.max_num_seqs=8.")
]
Address = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Of the server; default: the one of yours that is up.")
]


def main() -> None:
    """The `airside` program. Errors are one line on stderr (a configuration's: one per problem) and an exit code."""
    from airside.cluster.cli.errors import explain

    try:
        app()
    except Exception as error:
        found = explain(error)
        if found is None:
            raise
        text, code = found
        typer.echo(text, err=True)
        sys.exit(code)


@app.command()
def up(
    file: ConfigFile,
    overrides: Overrides = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return when the server is ready.")] = False,
) -> None:
    """Start a server. Ctrl-C once stops it in order, twice at once."""
    from airside.cluster.runs.up import UpOptions
    from airside.cluster.runs.up import up as run_server

    if not detach:
        raise typer.Exit(run_server(UpOptions(file, overrides or []), _states(), _tell))
    from airside.cluster.config.file import load_config
    from airside.cluster.environment import variables
    from airside.cluster.runs.detached import start_detached

    port = load_config(file, variables(), overrides or []).server.grpc.port
    arguments = [str(file), *(word for override in overrides or [] for word in ("--set", override))]
    state = start_detached(arguments, port, _states(), _tell)
    typer.echo(f"log: {_states().log_file(state.port if state else port)}")
    if state is None:
        raise typer.Exit(FAILURE)
    typer.echo(f"up: {state.address}; stop it with: airside down --port {state.port}")


@app.command()
def down(
    port: Annotated[int | None, typer.Option(help="Of the server to stop.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Stop all servers of yours.")] = False,
) -> None:
    """Stop a server, and clean up after one that was killed."""
    from airside.cluster.runs.down import choose_servers
    from airside.cluster.runs.down import down as stop_servers

    stop_servers(_states(), choose_servers(_states(), port, every), _tell)


@app.command()
def status(address: Address = None) -> None:
    """Show the processes of a server and its load."""
    from rich.console import Console

    from airside.cluster.cli.status_view import summary_lines, workers_table
    from airside.cluster.client import Client

    with Client(_address(address)) as client:
        info, workers = client.info(), client.list_workers()
    console = Console()
    for line in summary_lines(info, workers):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(workers_table(workers))


@app.command()
def generate(
    prompt: options.Prompt,
    image: options.Images = None,
    chat: options.Chat = False,
    max_tokens: options.MaxTokens = None,
    stop: options.StopStrings = None,
    n: options.NumContinuations = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    logprobs: options.Logprobs = None,
    json_schema: options.JsonSchema = None,
    json_object: options.JsonObject = False,
    regex: options.Regex = None,
    choice: options.Choices = None,
    lark: options.Lark = None,
    gbnf: options.Gbnf = None,
    user: options.User = "",
    address: Address = None,
) -> None:
    """Generate text, shown as it is made, then one line of usage on stderr."""
    from airside.cluster.sampling_params import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        stop=stop or (),
        logprobs=logprobs,
        n=n,
        user=user or None,
        json_schema=_read(json_schema),
        json_object=json_object or None,
        regex=regex,
        choice=choice or None,
        lark=_read(lark),
        gbnf=_read(gbnf),
    )
    if not _generate(prompt, image or [], chat, params, address):
        raise typer.Exit(FAILURE)


def _read(path: Path | None) -> str | None:
    return None if path is None else path.read_text(encoding="utf-8")


def _generate(prompt: str, images: list[str], chat: bool, params: SamplingParams, address: str | None) -> bool:
    """Whether it ended well."""
    from airside.cluster.cli.generate_view import show_events, with_marks
    from airside.cluster.client import Client, user_message
    from airside.controller.gateway.errors import RequestError

    try:
        params.to_request()
    except RequestError as error:
        raise typer.BadParameter(str(error)) from error
    with Client(_address(address)) as client:
        if chat:
            events = client.chat([user_message(prompt, images)], params)
        else:
            events = client.generate(with_marks(prompt, images, client), images, params)
        return show_events(events, sys.stdout, sys.stderr)


@scale_app.command("vision")
def scale_vision(
    size: Annotated[
        str, typer.Argument(metavar="SIZE", help="3: so many, whatever the load. 1-4: as the load asks, within that.")
    ],
    wait: Annotated[bool, typer.Option("--wait", help="Return when there are as many.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", min=0, help="Seconds to wait.")] = 60.0,
    address: Address = None,
) -> None:
    """Set how many vision workers there are, in place of vision.autoscaling_config. Nothing restarts."""
    from airside.cluster.cli.vision_size import VisionSize
    from airside.cluster.cli.wait_vision import wait_for_vision
    from airside.cluster.client import Client

    try:
        wanted = VisionSize.parse(size)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with Client(_address(address)) as client:
        client.scale_vision(wanted.fewest, wanted.most)
        typer.echo(f"vision workers: {wanted} wanted")
        if not wait:
            return
        pending = wait_for_vision(client, wanted, timeout_s, _tell)
    if pending:
        typer.echo(f"not there yet: {pending}", err=True)
        raise typer.Exit(FAILURE)


@config_app.command("check")
def config_check(file: ConfigFile, overrides: Overrides = None) -> None:
    """Name every problem of a file, each with its line."""
    _load(file, overrides)
    typer.echo(f"{file}: no problems")


@config_app.command("show")
def config_show(file: ConfigFile, overrides: Overrides = None) -> None:
    """Print the whole configuration that a file results in, defaults included, as YAML."""
    import yaml

    typer.echo(yaml.safe_dump(_load(file, overrides).model_dump(mode="json"), sort_keys=False), nl=False)


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON schema of configuration files: every key with its meaning."""
    import json

    from airside.cluster.config.schema import Config

    typer.echo(json.dumps(Config.model_json_schema(), indent=2))


@app.command()
def demo(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML configuration file.")] = EXAMPLE,
    keep: Annotated[bool, typer.Option("--keep", help="Only serve, and print lines to try.")] = False,
) -> None:
    """Fetch the demo model, serve it, ask it, scale it, stop it."""
    from airside.cluster.demo.demo import run

    raise typer.Exit(run(file, keep))


def _load(file: Path, overrides: list[str] | None) -> Any:  # Any: pydantic is not imported up here
    from airside.cluster.config.file import load_config
    from airside.cluster.environment import variables

    return load_config(file, variables(), overrides or [])


def _states() -> Any:  # Any: psutil is not imported up here
    from airside.cluster.cli.server_states import server_states

    return server_states()


def _address(given: str | None) -> str:
    """The address given, or that of the only server of this user that is up, or the usual one."""
    if given:
        return given
    from airside.cluster.client import DEFAULT_ADDRESS
    from airside.cluster.runs.run_state import ServerUnclear

    alive = [state for state in _states().all() if state.is_alive]
    if len(alive) > 1:
        addresses = ", ".join(state.address for state in alive)
        raise ServerUnclear(f"several servers are up ({addresses}); say which with --address")
    return alive[0].address if alive else DEFAULT_ADDRESS


def _tell(line: str) -> None:
    typer.echo(line)
    sys.stdout.flush()
