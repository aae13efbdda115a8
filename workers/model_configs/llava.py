"""LLaVA: a CLIP or SigLIP tower before a Llama or a Qwen2."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airside.workers.model_config import CheckpointError, ModelConfig
from airside.workers.model_configs import llama, qwen
from airside.workers.model_configs.vision_tower import CLIP_DEFAULTS, SIGLIP_DEFAULTS, TowerConfig, tower_values

_TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 32_000, "intermediate_size": 11_008, "max_position_embeddings": 2048},
    "qwen2": {"vocab_size": 151_936, "intermediate_size": 22_016, "max_position_embeddings": 32_768},
}  # Any: JSON. Of LlamaConfig and Qwen2Config: a LLaVA's text_config may say only what differs
_TEXT_PARSERS = {"llama": llama.PARSERS["LlamaForCausalLM"], "qwen2": qwen.PARSERS["Qwen2ForCausalLM"]}

_TOWER_DEFAULTS = {"clip_vision_model": CLIP_DEFAULTS, "siglip_vision_model": SIGLIP_DEFAULTS}

_NO_TOWER_CONFIG = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
"""The CLIP of a LlavaConfig without `vision_config`."""


@dataclass(frozen=True, slots=True)
class LlavaVisionConfig(TowerConfig):
    """The vision tower and its projector."""

    has_class_token: bool  # CLIP; otherwise SigLIP
    states: tuple[int, ...]  # numbers of the tower's states that are joined; 0 is what goes into its first layer
    drops_first_token: bool  # strategy "default"; otherwise "full"
    projector_hidden_act: str
    projector_bias: bool


def _parse_llava(config: Mapping[str, Any], eos_token_ids: tuple[int, ...], file: Path) -> ModelConfig:
    text = config.get("text_config") or {}
    text_type = text.get("model_type", "llama")
    if text_type not in _TEXT_PARSERS:
        known = ", ".join(_TEXT_PARSERS)
        raise CheckpointError(f"{file}: a text model of type {text_type} is not supported; supported: {known}")
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, **_TEXT_DEFAULTS[text_type]}
    language = _TEXT_PARSERS[text_type]({**sizes, **text}, eos_token_ids, file)
    return dataclasses.replace(
        language,
        architecture="LlavaForConditionalGeneration",
        tie_word_embeddings=bool(config.get("tie_word_embeddings")) or language.tie_word_embeddings,
        dtype=config.get("dtype") or config.get("torch_dtype") or language.dtype,
        image_token_id=config.get("image_token_id", config.get("image_token_index", 32_000)),
        vision=_vision(config, file),
    )


def _vision(config: Mapping[str, Any], file: Path) -> LlavaVisionConfig:
    vision = config.get("vision_config") or _NO_TOWER_CONFIG
    tower = vision.get("model_type", "clip_vision_model")
    if tower not in _TOWER_DEFAULTS:
        known = ", ".join(_TOWER_DEFAULTS)
        raise CheckpointError(f"{file}: a vision tower of type {tower} is not supported; supported: {known}")
    strategy = config.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise CheckpointError(f"{file}: vision_feature_select_strategy {strategy} is not default or full")
    values = tower_values(vision, _TOWER_DEFAULTS[tower], file)
    return LlavaVisionConfig(
        **values,
        has_class_token=tower == "clip_vision_model",
        states=_states(config.get("vision_feature_layer", -2), values["num_layers"], file),
        drops_first_token=strategy == "default",
        projector_hidden_act=config.get("projector_hidden_act", "gelu"),
        projector_bias=config.get("multimodal_projector_bias", True),
    )


def _states(layers: int | list[int], num_layers: int, file: Path) -> tuple[int, ...]:
    """`vision_feature_layer` as numbers from 0, which is the state before the first layer; negative ones count back."""
    said = [layers] if isinstance(layers, int) else layers
    if not said or not all(-num_layers - 1 <= layer <= num_layers for layer in said):
        raise CheckpointError(
            f"{file}: vision_feature_layer {layers} is not among the {num_layers} layers of the tower"
        )
    return tuple(layer % (num_layers + 1) for layer in said)


PARSERS = {"LlavaForConditionalGeneration": _parse_llava}
