"""Idefics3 (Laurençon et al. 2024, arXiv 2408.12637): a vision tower, a connector, and a Llama."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from airside.workers.linear import make_linear
from airside.workers.model_config import ModelConfig
from airside.workers.model_configs.idefics3 import Idefics3VisionConfig
from airside.workers.models.idefics3_vision import VisionTower
from airside.workers.models.llama import LlamaForCausalLM
from airside.workers.parallel import RankGroup
from airside.workers.weights.release_names import find_name
from airside.workers.weights.weight_source import WeightSource


class Idefics3ForConditionalGeneration(LlamaForCausalLM):
    """A CausalModel whose pictures become token embeddings. Every rank holds the whole tower.

    Raises:
        CheckpointError: a tensor is missing or has the wrong shape.
    """

    def __init__(self, config: ModelConfig, weights: WeightSource, group: RankGroup, max_positions: int) -> None:
        super().__init__(config, weights, group, max_positions, ("model.text_model.", "text_model."))
        assert isinstance(config.vision, Idefics3VisionConfig)
        vision = config.vision
        at = find_name(weights, ("model.", ""), "vision_model.post_layernorm.weight")
        self._tower = VisionTower(weights, f"{at}vision_model", vision)
        self._scale_factor = vision.scale_factor
        shuffled = vision.hidden_size * vision.scale_factor**2
        name = f"{at}connector.modality_projection.proj.weight"
        self._projection = make_linear(weights.read(name, (config.hidden_size, shuffled)))

    def encode_image(self, pixels: Mapping[str, Tensor]) -> Tensor:
        """One picture's tiles -> [num_tiles * tokens_per_tile, hidden].

        Args:
            pixels: `pixel_values` [..., num_tiles, channels, height, width], and, when the processor padded,
                `pixel_attention_mask` [..., num_tiles, height, width]; leading axes of one entry are allowed.
        """
        values = pixels["pixel_values"].flatten(0, -4)
        mask = pixels.get("pixel_attention_mask")
        features = self._tower(values, None if mask is None else mask.flatten(0, -3).bool())
        return self._projection(shuffle_pixels(features, self._scale_factor))


def shuffle_pixels(features: Tensor, factor: int) -> Tensor:
    """Joins each square of factor x factor neighbouring patches into one vector, row by row.

    Args:
        features: [num_tiles, rows, columns, hidden].
    Returns: [num_tiles * rows * columns / factor**2, factor**2 * hidden].
    """
    tiles, rows, columns, hidden = features.shape
    squares = features.view(tiles, rows // factor, factor, columns // factor, factor, hidden)
    return squares.permute(0, 1, 3, 2, 4, 5).reshape(-1, factor * factor * hidden)


MODELS = {"Idefics3ForConditionalGeneration": Idefics3ForConditionalGeneration}
