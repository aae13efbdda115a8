"""Gemma 3: the decoder by itself, and with a SigLIP tower."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airside.workers.model_config import CheckpointError, ModelConfig, PictureTokens, RopeConfig, SlidingWindowConfig
from airside.workers.model_configs.decoder import decoder, read_rope
from airside.workers.model_configs.vision_tower import SIGLIP_DEFAULTS, TowerConfig, tower_values

_TEXT_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
"""Of Gemma3TextConfig: a checkpoint's config may say only what differs."""

_THETAS = {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}
_PATTERN = 6  # of so many layers the last attends to everything

_NOT_SUPPORTED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")


@dataclass(frozen=True, slots=True)
class Gemma3VisionConfig(TowerConfig):
    """The vision tower, and how its patches become tokens."""

    tokens_per_side: int  # the patches are pooled to a square of so many by so many

    @property
    def pool_size(self) -> int:
        """Patches per side of the square that becomes one token."""
        return self.patches_per_side // self.tokens_per_side


def _parse_text(config: Mapping[str, Any], eos_token_ids: tuple[int, ...], file: Path) -> ModelConfig:
    text = {**_TEXT_DEFAULTS, **config}
    if text["hidden_activation"] != "gelu_pytorch_tanh":
        raise CheckpointError(
            f"{file}: hidden_activation {text['hidden_activation']} is not supported; supported: gelu_pytorch_tanh"
        )
    for key in _NOT_SUPPORTED:
        if text.get(key):
            raise CheckpointError(f"{file}: {key} is not supported; use a checkpoint without it")
    ropes = {kind: _rope(text, kind, file) for kind in _THETAS}
    tied = config.get("tie_word_embeddings", True)
    plain = {key: value for key, value in text.items() if key not in ("rope_parameters", "rope_scaling")}
    return dataclasses.replace(
        decoder("Gemma3ForCausalLM", plain, tied, eos_token_ids, file),
        rope=ropes["full_attention"],
        qk_norm=True,
        zero_centred_norms=True,
        attention_scale=float(text["query_pre_attn_scalar"] ** -0.5),
        sliding=_sliding(text, ropes["sliding_attention"], file),
    )


def _rope(text: Mapping[str, Any], kind: str, file: Path) -> RopeConfig:
    """Of the layers of one kind: `rope_parameters` has an entry for each (transformers 5), or there are keys for each.

    Scaling by a key of the older form is of the layers that attend to everything, alone.
    """
    is_full = kind == "full_attention"
    values = dict((text.get("rope_parameters") or {}).get(kind) or {})
    if is_full:
        values = {**(text.get("rope_scaling") or {}), **values}
    older = text.get("rope_theta" if is_full else "rope_local_base_freq")
    theta = values.pop("rope_theta", None) or older or _THETAS[kind]
    return read_rope({"rope_parameters": {**values, "rope_theta": theta}}, text["max_position_embeddings"], file)


def _sliding(text: Mapping[str, Any], rope: RopeConfig, file: Path) -> SlidingWindowConfig | None:
    num_layers = text["num_hidden_layers"]
    pattern = text.get("sliding_window_pattern", _PATTERN)
    types = text.get("layer_types") or [
        "sliding_attention" if (layer_id + 1) % pattern else "full_attention" for layer_id in range(num_layers)
    ]
    if len(types) != num_layers or set(types) - set(_THETAS):
        raise CheckpointError(
            f"{file}: layer_types must name each of {num_layers} layers sliding_attention or full_attention"
        )
    layers = tuple(layer_id for layer_id, kind in enumerate(types) if kind == "sliding_attention")
    if not layers:
        return None
    window = text["sliding_window"]
    if not isinstance(window, int) or window < 1:
        raise CheckpointError(f"{file}: sliding_window {window} is no window for layers {list(layers)}")
    return SlidingWindowConfig(layers=layers, window=window, rope=rope)


def _parse_gemma3(config: Mapping[str, Any], eos_token_ids: tuple[int, ...], file: Path) -> ModelConfig:
    text = config.get("text_config") or {}
    if text.get("model_type", "gemma3_text") != "gemma3_text":
        raise CheckpointError(
            f"{file}: a text model of type {text['model_type']} is not supported; supported: gemma3_text"
        )
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", True))
    language = _parse_text({**text, "tie_word_embeddings": tied}, eos_token_ids, file)
    tokens_per_image = config.get("mm_tokens_per_image", 256)
    return dataclasses.replace(
        language,
        architecture="Gemma3ForConditionalGeneration",
        dtype=config.get("dtype") or config.get("torch_dtype") or language.dtype,
        image_token_id=config.get("image_token_id", config.get("image_token_index", 262_144)),
        pictures=PictureTokens(
            mark_id=config.get("boi_token_id", config.get("boi_token_index", 255_999)),
            mark_text=("\n\n", "\n\n"),
            num_atomic=tokens_per_image,
        ),
        vision=_vision(config.get("vision_config") or {}, tokens_per_image, file),
    )


def _vision(vision: Mapping[str, Any], tokens_per_image: int, file: Path) -> Gemma3VisionConfig:
    tower = vision.get("model_type", "siglip_vision_model")
    if tower != "siglip_vision_model":
        raise CheckpointError(
            f"{file}: a vision tower of type {tower} is not supported; supported: siglip_vision_model"
        )
    tokens_per_side = int(tokens_per_image**0.5)
    made = Gemma3VisionConfig(**tower_values(vision, SIGLIP_DEFAULTS, file), tokens_per_side=tokens_per_side)
    if tokens_per_side**2 != tokens_per_image or made.patches_per_side % tokens_per_side:
        raise CheckpointError(
            f"{file}: {made.patches_per_side} by {made.patches_per_side} patches cannot be pooled evenly to a square "
            f"of mm_tokens_per_image {tokens_per_image} tokens"
        )
    return made


PARSERS = {"Gemma3ForCausalLM": _parse_text, "Gemma3ForConditionalGeneration": _parse_gemma3}
