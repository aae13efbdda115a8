"""Which family a checkpoint belongs to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image


class UnsupportedModel(Exception):
    """The checkpoint's pictures cannot be processed; the text says why and what would help."""


class Family(Protocol):
    """A checkpoint's way with pictures."""

    def shape(self, width: int, height: int) -> NDArray[np.int32]:
        """The token ids, [num_tokens], that take the place of the mark of a picture of this upright size in pixels."""
        ...

    def process(self, image: Image.Image) -> dict[str, NDArray[Any]]:
        """The tensors of one upright RGB picture by name; the family's docstring gives their shapes and dtypes."""
        ...


def load_family(model_path: str) -> Family:
    """Loads the checkpoint's own image processor and tokenizer.

    Args:
        model_path: a checkpoint folder in Hugging Face layout.

    Raises:
        UnsupportedModel: a text-only model, a family that is not known, or a checkpoint with parts missing.
    """
    folder = Path(model_path)
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{folder} is no checkpoint folder: config.json cannot be read ({error})") from error
    model_type = config.get("model_type")
    match model_type:
        case "idefics3" | "smolvlm":
            # Imported here: each family pulls in what it alone needs, and that takes seconds.
            from airside.vision_workers.families.idefics3 import Idefics3

            return Idefics3(folder, config)
        case _ if "vision_config" not in config:
            raise UnsupportedModel(f"{folder} is a text-only model ({model_type}): it takes no pictures")
        case _:
            raise UnsupportedModel(
                f"pictures for model type {model_type!r} are not supported; idefics3 and smolvlm are"
            )
