"""Which family a checkpoint belongs to: the `FAMILIES` of every file in this folder."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from airside.vision_workers import families
from airside.vision_workers.families.family import Family, UnsupportedModel

FamilyClass = Callable[[Path, dict[str, Any]], Family]  # Any: JSON


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
    known = _families()
    if model_type in known:
        return known[model_type](folder, config)
    if "vision_config" not in config:
        raise UnsupportedModel(f"{folder} is a text-only model ({model_type}): it takes no pictures")
    raise UnsupportedModel(
        f"pictures for model type {model_type!r} are not supported; supported: {', '.join(sorted(known))}"
    )


def _families() -> dict[str, FamilyClass]:
    found: dict[str, FamilyClass] = {}
    for module in pkgutil.iter_modules(families.__path__):
        if module.name != "registry":
            found |= getattr(importlib.import_module(f"{families.__name__}.{module.name}"), "FAMILIES", {})
    return found
