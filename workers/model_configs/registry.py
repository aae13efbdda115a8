"""Which parser reads the config of which architecture: the `PARSERS` of every file in this folder."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from airside.workers import model_configs
from airside.workers.model_config import ModelConfig

Parser = Callable[[Mapping[str, Any], tuple[int, ...], Path], ModelConfig]  # Any: JSON
"""`(config, eos_token_ids, file)`. Raises CheckpointError, or KeyError for a key that the config must have."""


def _parsers() -> dict[str, Parser]:
    found: dict[str, Parser] = {}
    for module in pkgutil.iter_modules(model_configs.__path__):
        if module.name != "registry":
            found |= getattr(importlib.import_module(f"{model_configs.__name__}.{module.name}"), "PARSERS", {})
    return found


PARSERS = _parsers()
SUPPORTED_ARCHITECTURES = tuple(PARSERS)
