"""Which class builds which architecture: the `MODELS` of every file in this folder."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

from airside.workers import models
from airside.workers.model_config import ModelConfig
from airside.workers.models.causal_model import CausalModel
from airside.workers.parallel import RankGroup
from airside.workers.weights.weight_source import WeightSource

ModelClass = Callable[[ModelConfig, WeightSource, RankGroup, int], CausalModel]
"""`(config, weights, group, max_positions)`. Raises CheckpointError as `load_model`."""


def _models() -> dict[str, ModelClass]:
    found: dict[str, ModelClass] = {}
    for module in pkgutil.iter_modules(models.__path__):
        if module.name != "registry":
            found |= getattr(importlib.import_module(f"{models.__name__}.{module.name}"), "MODELS", {})
    return found


MODELS = _models()


def load_model(config: ModelConfig, weights: WeightSource, group: RankGroup, max_positions: int) -> CausalModel:
    """This rank's part of the model. Raises CheckpointError naming a tensor that is missing or does not fit."""
    return MODELS[config.architecture](config, weights, group, max_positions)
