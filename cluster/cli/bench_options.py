"""Options that commands of `airside bench` share, as typer takes them, and what their texts mean."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

Model = Annotated[str, typer.Option(help='"demo", a folder, a .gguf file or a Hugging Face id.')]
Prompt = Annotated[int | None, typer.Option(min=1, help="Tokens of a prompt.")]
Output = Annotated[int | None, typer.Option(min=2, help="Tokens of an output.")]
Context = Annotated[int | None, typer.Option(min=1, help="Tokens that each sequence has in the cache.")]
Rounds = Annotated[int | None, typer.Option(min=1, help="Measurements of each figure, of which the median counts.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="As in the YAML file: engine.num_threads=1.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Small and once: does it run, not how fast.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write everything, every sample too, to this file.")]
Plot = Annotated[Path | None, typer.Option(help="Draw to this file, .png, .svg or .pdf; needs matplotlib.")]


def counts_of(option: str, text: str | None) -> tuple[int, ...] | None:
    """ "1,32" as numbers, in order; None stays None."""
    if text is None:
        return None
    try:
        counts = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        counts = ()
    if not counts or counts[0] < 1:
        raise typer.BadParameter(f"{text!r}: numbers from 1 on, with commas between them", param_hint=option)
    return counts


def values_of(settings: list[str] | None) -> dict[str, dict[str, Any]]:  # Any: checked by the configuration
    """Keys of the YAML file, block by block; values are read as YAML."""
    import yaml

    found: dict[str, dict[str, Any]] = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        block, _, name = key.partition(".")
        if not equals or not name:
            raise typer.BadParameter(f"{setting!r} must be like engine.num_threads=1", param_hint="--set")
        *outer, last = name.split(".")
        place = found.setdefault(block, {})
        for each in outer:
            place = place.setdefault(each, {})
        place[last] = yaml.safe_load(value)
    return found


def llm_arguments(settings: list[str] | None) -> dict[str, Any]:  # Any: as above
    """The same as arguments of `LLM`."""
    values = values_of(settings)
    unknown = values.keys() - {"model", "engine"}
    if unknown:
        raise typer.BadParameter(f"LLM has no block {min(unknown)}; only model and engine", param_hint="--set")
    return {**values.get("model", {}), **values.get("engine", {})}
