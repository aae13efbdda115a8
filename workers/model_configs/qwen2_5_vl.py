"""Qwen2.5-VL: a Qwen2 behind a vision tower of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airside.workers.model_config import CheckpointError, ModelConfig, PictureTokens, RopeAxes, VisionConfig
from airside.workers.model_configs import qwen

_TEXT_DEFAULTS = {
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
}
"""Of Qwen2_5_VLTextConfig, for a config that says only what differs."""

_SECTIONS = (16, 24, 24)


@dataclass(frozen=True, slots=True)
class Qwen25VisionConfig(VisionConfig):
    """The vision tower and its merger. Sizes are in pixels."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_channels: int
    patch_size: int
    temporal_patch_size: int  # frames of a patch; a picture is repeated to fill them
    merge_size: int  # merge_size**2 patches become one token
    window_size: int  # most layers attend within squares of so many pixels
    full_attention_layers: tuple[int, ...]  # the others
    rope_theta: float

    @property
    def patch_values(self) -> int:
        """Numbers in a flattened patch."""
        return self.num_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def window_tokens(self) -> int:
        """Tokens on a side of a window."""
        return self.window_size // self.merge_size // self.patch_size


def _parse_qwen2_5_vl(config: Mapping[str, Any], eos_token_ids: tuple[int, ...], file: Path) -> ModelConfig:
    # Published checkpoints have the decoder's keys beside the vision tower's; later ones have them in text_config.
    text = {**_TEXT_DEFAULTS, **(config.get("text_config") or config)}
    text.pop("head_dim", None)
    rope_key = "rope_parameters" if text.get("rope_parameters") else "rope_scaling"
    rope = dict(text.get(rope_key) or {})
    sections = tuple(rope.pop("mrope_section", _SECTIONS))
    if (rope.get("rope_type") or rope.get("type")) == "mrope":
        rope["rope_type"] = "default"  # of each axis
    tied = config.get("tie_word_embeddings", False) or text.get("tie_word_embeddings", False)
    values = {**text, rope_key: rope, "tie_word_embeddings": tied}
    language = qwen.PARSERS["Qwen2ForCausalLM"](values, eos_token_ids, file)
    if sum(sections) * 2 != language.head_dim:
        raise CheckpointError(
            f"{file}: mrope_section {list(sections)} must add up to half of the head dimension {language.head_dim}"
        )
    vision = _vision(config.get("vision_config") or {}, language.hidden_size, file)
    return dataclasses.replace(
        language,
        architecture="Qwen2_5_VLForConditionalGeneration",
        dtype=config.get("dtype") or config.get("torch_dtype") or language.dtype,
        image_token_id=config.get("image_token_id", 151_655),
        vision=vision,
        rope_axes=RopeAxes(sections, vision.merge_size),
        pictures=PictureTokens(takes_pixel_ranges=True),
    )


def _vision(vision: Mapping[str, Any], hidden_size: int, file: Path) -> Qwen25VisionConfig:
    for key in ("patch_size", "temporal_patch_size"):
        if not isinstance(vision.get(key, 0), int):
            raise CheckpointError(f"{file}: vision_config.{key} {vision[key]} is not supported; one number is")
    if (act := vision.get("hidden_act", "silu")) != "silu":
        raise CheckpointError(f"{file}: vision_config.hidden_act {act} is not supported; supported: silu")
    made = vision.get("out_hidden_size", 3584)
    if made != hidden_size:
        raise CheckpointError(
            f"{file}: the vision tower makes vectors of {made} numbers (vision_config.out_hidden_size), but the "
            f"decoder has a hidden_size of {hidden_size}"
        )
    tower = Qwen25VisionConfig(
        hidden_size=vision.get("hidden_size", 3584),
        intermediate_size=vision.get("intermediate_size", 3420),
        num_layers=vision.get("depth", 32),
        num_heads=vision.get("num_heads", 16),
        num_channels=vision.get("in_channels", 3),
        patch_size=vision.get("patch_size", 14),
        temporal_patch_size=vision.get("temporal_patch_size", 2),
        merge_size=vision.get("spatial_merge_size", 2),
        window_size=vision.get("window_size", 112),
        full_attention_layers=tuple(vision.get("fullatt_block_indexes", (7, 15, 23, 31))),
        rope_theta=float((vision.get("rope_parameters") or {}).get("rope_theta", 10_000.0)),
    )
    if tower.hidden_size % (4 * tower.num_heads) != 0:
        raise CheckpointError(
            f"{file}: {tower.num_heads} heads of the vision tower (num_heads) do not divide its hidden_size "
            f"{tower.hidden_size} into multiples of 4"
        )
    if tower.window_tokens < 1:
        raise CheckpointError(f"{file}: vision_config.window_size {tower.window_size} is smaller than a token")
    return tower


PARSERS = {"Qwen2_5_VLForConditionalGeneration": _parse_qwen2_5_vl}
