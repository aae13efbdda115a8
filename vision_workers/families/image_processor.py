"""A checkpoint's own image processor, and the texts beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from airside.vision_workers.families.family import UnsupportedModel


def load_image_processor(folder: Path) -> Any:  # Any: a transformers class that the checkpoint names
    """The image processor in its Pillow form: torchvision's differs in the last bits, and is not always installed.

    Raises:
        UnsupportedModel: there is none, or none without torchvision.
    """
    from transformers import AutoImageProcessor  # seconds, for those alone who need it
    from transformers.image_processing_backends import PilBackend

    try:
        processor = AutoImageProcessor.from_pretrained(
            folder, backend="pil", local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the library raises whatever its parsers raise
        raise UnsupportedModel(f"{folder} has no usable image processor: {error}") from error
    if not isinstance(processor, PilBackend):
        raise UnsupportedModel(
            f"the image processor {type(processor).__name__} of {folder} works only with torchvision, which vision "
            "workers do without; use a checkpoint whose image processor transformers has with the pil backend"
        )
    return processor


def load_tokenizer(folder: Path) -> Tokenizer:
    """From tokenizer.json. Raises UnsupportedModel."""
    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises plain Exception
        raise UnsupportedModel(f"{folder} has no usable tokenizer: tokenizer.json: {error}") from error


def processor_config(folder: Path) -> dict[str, Any]:  # Any: JSON
    """What processor_config.json says; nothing where there is none."""
    path = folder / "processor_config.json"
    try:
        told = json.loads(path.read_text()) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{path} cannot be read: {error}") from error
    return told if isinstance(told, dict) else {}
