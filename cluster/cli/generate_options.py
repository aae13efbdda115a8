"""Options of `airside generate`, as typer takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from airside.cluster.image_source import is_path


def _files_exist(images: list[str] | None) -> list[str] | None:
    """Refuses a path before anything is sent."""
    for image in images or ():
        if is_path(image) and not Path(image).is_file():
            raise typer.BadParameter(f"no file of this name: {image[:200]!r}")
    return images


Prompt = Annotated[str, typer.Argument(help="The prompt, or with --chat the user's message.")]
Images = Annotated[
    list[str] | None,
    typer.Option("--image", callback=_files_exist, help="An image file, or a URL that the server fetches; repeatable."),
]
Chat = Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")]
MaxTokens = Annotated[int | None, typer.Option(help="At most this many new tokens.")]
StopStrings = Annotated[list[str] | None, typer.Option("--stop", help="A text that ends the text; repeatable.")]
NumContinuations = Annotated[int | None, typer.Option("--n", help="How many continuations.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.")]
TopK = Annotated[int | None, typer.Option(help="Keep the k most likely tokens; 0: all.")]
TopP = Annotated[float | None, typer.Option(help="Keep the most likely tokens of this mass.")]
MinP = Annotated[float | None, typer.Option(help="Drop tokens less likely than this times the most likely.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Fixes the random numbers.")]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Of tokens in prompt or output; 1: none.")]
PresencePenalty = Annotated[float | None, typer.Option(help="Of tokens in the output; 0: none.")]
FrequencyPenalty = Annotated[float | None, typer.Option(help="The same for each time they are there; 0: none.")]
Logprobs = Annotated[int | None, typer.Option(help="Show log-probabilities, with so many alternatives.")]
JsonSchema = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="A file: the text must be JSON of this schema.")
]
JsonObject = Annotated[bool, typer.Option("--json", help="The text must be a JSON object.")]
Regex = Annotated[str | None, typer.Option(help="The whole text must match this.")]
Choices = Annotated[list[str] | None, typer.Option("--choice", help="The text must be one of these; repeatable.")]
Lark = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="A file: a grammar of the text, in Lark's notation.")
]
Gbnf = Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="The same in llama.cpp's GBNF.")]
User = Annotated[str, typer.Option(help="Who asks: users get equal shares of the server.")]
