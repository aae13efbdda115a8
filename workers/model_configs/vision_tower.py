"""What the vision towers of several families say in the same words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airside.workers.model_config import CheckpointError, VisionConfig


@dataclass(frozen=True, slots=True)
class TowerConfig(VisionConfig):
    """A vision transformer of the kind of CLIP and SigLIP. Sizes are in pixels."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_channels: int
    image_size: int
    patch_size: int
    hidden_act: str
    layer_norm_eps: float

    @property
    def patches_per_side(self) -> int:
        """Of the pictures that the tower was trained on."""
        return self.image_size // self.patch_size


def tower_values(vision: Mapping[str, Any], defaults: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The arguments of a TowerConfig.

    Args:
        vision: the part of the config that describes the tower.
        defaults: what holds for keys that are not there; each family has its own.
    Raises:
        CheckpointError: pictures or patches that are not square, heads that do not divide the hidden size.
    """
    said = {**defaults, **vision}
    for key in ("image_size", "patch_size"):
        if not isinstance(said[key], int):
            raise CheckpointError(f"{file}: vision_config.{key} {said[key]} is not supported; one number is")
    hidden, num_heads = said["hidden_size"], said["num_attention_heads"]
    if hidden % num_heads != 0:
        raise CheckpointError(f"{file}: {num_heads} attention heads do not divide vision hidden_size {hidden}")
    return {
        "hidden_size": hidden,
        "intermediate_size": said["intermediate_size"],
        "num_layers": said["num_hidden_layers"],
        "num_heads": num_heads,
        "num_channels": said["num_channels"],
        "image_size": said["image_size"],
        "patch_size": said["patch_size"],
        "hidden_act": said["hidden_act"],
        "layer_norm_eps": said["layer_norm_eps"],
    }


SIGLIP_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
"""Of SiglipVisionConfig."""

CLIP_DEFAULTS = {**SIGLIP_DEFAULTS, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
"""Of CLIPVisionConfig."""
