"""Qwen2.5-VL (Bai et al. 2025, arXiv 2502.13923): a vision tower with windows, and a Qwen2 with three position axes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from airside.workers.model_config import ModelConfig
from airside.workers.model_configs.qwen2_5_vl import Qwen25VisionConfig
from airside.workers.models.llama import LlamaForCausalLM
from airside.workers.models.qwen2_5_vl_vision import VisionTower
from airside.workers.parallel import RankGroup
from airside.workers.weights.release_names import find_name
from airside.workers.weights.weight_source import WeightSource

_TEXT_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "language_model.")
_TOWERS = ("visual", "model.visual")
"""Where the checkpoints of different releases of transformers have the same tensors."""


class Qwen25VLForConditionalGeneration(LlamaForCausalLM):
    """A CausalModel whose pictures become token embeddings. Every rank holds the whole tower.

    Raises:
        CheckpointError: a tensor is missing or has the wrong shape.
    """

    def __init__(self, config: ModelConfig, weights: WeightSource, group: RankGroup, max_positions: int) -> None:
        super().__init__(config, weights, group, max_positions, _TEXT_PREFIXES, ("lm_head", "language_model.lm_head"))
        assert isinstance(config.vision, Qwen25VisionConfig)
        at = find_name(weights, _TOWERS, ".patch_embed.proj.weight")
        self._tower = VisionTower(weights, at, config.vision, config.hidden_size)

    def encode_image(self, pixels: Mapping[str, Tensor]) -> Tensor:
        """One picture -> [num_image_tokens, hidden].

        Args:
            pixels: `pixel_values` [num_patches, channels * temporal_patch_size * patch_size**2], square by square of
                those that become one token; `image_grid_thw` [1, 3]: the patches on each axis.
        """
        time, height, width = pixels["image_grid_thw"].view(-1).tolist()
        return self._tower(pixels["pixel_values"], (time, height, width))


MODELS = {"Qwen2_5_VLForConditionalGeneration": Qwen25VLForConditionalGeneration}
