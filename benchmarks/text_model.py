"""The text part of a checkpoint as a checkpoint of its own, for engines that know text models only.

`python benchmarks/text_model.py demo FOLDER`
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from airside.cluster.model_source import DEMO, ModelSourceError, resolve

SOURCE_FILE = "airside_source.txt"


class TextModelError(Exception):
    """There can be no such folder, or there is another; the message says why."""


def text_model(source: str, folder: Path) -> None:
    """Writes the text part to `folder`, unless it is there. Raises as `write_text_model`, and when it is another's."""
    if not folder.exists():
        tell(f"writing the text part of {source} to {folder}")
        write_text_model(source, folder)
    known = folder / SOURCE_FILE
    if not known.is_file():
        tell(f"{folder}: taken as it is; it does not say which model it is of")
    elif known.read_text(encoding="utf-8").strip() != name_of(source):
        raise TextModelError(
            f"{folder} is of {known.read_text(encoding='utf-8').strip()}, not of {name_of(source)}: "
            f"move {folder.parent} away, or name another folder with --peers"
        )


def write_text_model(source: str, folder: Path) -> None:
    """Writes weights in bfloat16, config and tokenizer; a text model is written as it is.

    The folder appears when it is complete. Raises ModelSourceError; TextModelError when it is there, or the
    model's text part is not a model of its own.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

    if folder.exists():
        raise TextModelError(f"{folder} is there already; remove it, or name another")
    checkpoint = resolve(source, tell)
    if checkpoint.is_file():
        raise TextModelError(f"{source}: a .gguf file is no checkpoint that can be converted; give the folder it is of")
    config = AutoConfig.from_pretrained(checkpoint)
    if getattr(config, "vision_config", None) is None:
        text = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    else:
        whole = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.bfloat16)
        try:
            with torch.device("meta"):  # the parts are put in below; nothing is allocated twice
                text = AutoModelForCausalLM.from_config(config.text_config, dtype=torch.bfloat16)
        except ValueError as error:
            raise TextModelError(f"{source}: transformers has no text model of {config.model_type} alone") from error
        text.model = getattr(whole.model, "text_model", None) or whole.model.language_model
        text.lm_head = whole.lm_head
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    text.save_pretrained(part)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(part)
    (part / SOURCE_FILE).write_text(f"{name_of(source)}\n", encoding="utf-8")
    part.rename(folder)


def name_of(source: str) -> str:
    """The same for the same model, whatever the current folder."""
    path = Path(source).expanduser()
    return str(path.resolve()) if source != DEMO and path.exists() else source


def tell(line: str) -> None:
    """Progress."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        write_text_model(sys.argv[1], Path(sys.argv[2]))
    except (ModelSourceError, TextModelError) as error:
        sys.exit(str(error))
