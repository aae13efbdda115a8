"""Idefics3 and SmolVLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airside.workers.model_config import CheckpointError, ModelConfig
from airside.workers.model_configs.decoder import decoder
from airside.workers.model_configs.vision_tower import SIGLIP_DEFAULTS, TowerConfig, tower_values

_TOWER_DEFAULTS = {
    **SIGLIP_DEFAULTS,
    "hidden_size": 1152,
    "num_attention_heads": 16,
    "patch_size": 32,
}
"""Of Idefics3VisionConfig."""


@dataclass(frozen=True, slots=True)
class Idefics3VisionConfig(TowerConfig):
    """The vision tower and its connector."""

    scale_factor: int  # of the pixel shuffle: scale_factor**2 patches become one token


def _parse_idefics3(config: Mapping[str, Any], eos_token_ids: tuple[int, ...], file: Path) -> ModelConfig:
    text = {"rms_norm_eps": 1e-5, **config["text_config"]}
    if text.get("model_type", "llama") != "llama":
        raise CheckpointError(f"{file}: a text model of type {text['model_type']} is not supported; supported: llama")
    tied = config.get("tie_word_embeddings", False)
    language = decoder("Idefics3ForConditionalGeneration", text, tied, eos_token_ids, file)
    return dataclasses.replace(
        language,
        dtype=config.get("dtype") or config.get("torch_dtype") or language.dtype,
        image_token_id=config.get("image_token_id", 128_257),
        vision=Idefics3VisionConfig(
            **tower_values(config.get("vision_config") or {}, _TOWER_DEFAULTS, file),
            scale_factor=config.get("scale_factor", 2),
        ),
    )


PARSERS = {"Idefics3ForConditionalGeneration": _parse_idefics3}
