"""LLaVA (Liu et al. 2023, arXiv 2304.08485): a vision tower, a projector of two layers, and a Llama or a Qwen2."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from airside.workers.linear import Linear, make_linear
from airside.workers.model_config import ModelConfig
from airside.workers.model_configs.llava import LlavaVisionConfig
from airside.workers.models.llama import LlamaForCausalLM
from airside.workers.models.vision_layers import activation
from airside.workers.models.vision_transformer import VisionTransformer
from airside.workers.parallel import RankGroup
from airside.workers.weights.release_names import DECODERS, HEADS, TOWERS, find_name
from airside.workers.weights.weight_source import WeightSource


class LlavaForConditionalGeneration(LlamaForCausalLM):
    """A CausalModel whose pictures become token embeddings. Every rank holds the whole tower.

    Raises:
        CheckpointError: a tensor is missing or has the wrong shape, or an activation is not supported.
    """

    def __init__(self, config: ModelConfig, weights: WeightSource, group: RankGroup, max_positions: int) -> None:
        super().__init__(config, weights, group, max_positions, DECODERS, HEADS)
        assert isinstance(config.vision, LlavaVisionConfig)
        self._vision = vision = config.vision
        self._tower = VisionTransformer(
            weights,
            find_name(weights, TOWERS, "embeddings.position_embedding.weight"),
            vision,
            has_class_token=vision.has_class_token,
            num_layers=max(vision.states),
        )
        self._projector = Projector(weights, config.hidden_size, vision)

    def encode_image(self, pixels: Mapping[str, Tensor]) -> Tensor:
        """One picture -> [num_image_tokens, hidden].

        Args:
            pixels: `pixel_values` [1, channels, image_size, image_size].
        """
        joined = torch.cat(self._tower.states(pixels["pixel_values"], self._vision.states), dim=-1)
        if self._vision.drops_first_token:
            joined = joined[:, 1:]
        return self._projector(joined.flatten(0, 1))


class Projector:
    """Two layers from the tower's hidden size to the decoder's."""

    def __init__(self, weights: WeightSource, hidden: int, vision: LlavaVisionConfig) -> None:
        at = find_name(weights, ("", "model."), "multi_modal_projector.linear_1.weight")

        def layer(name: str, in_features: int) -> Linear:
            name = f"{at}multi_modal_projector.{name}"
            bias = weights.read(f"{name}.bias", (hidden,)) if vision.projector_bias else None
            return make_linear(weights.read(f"{name}.weight", (hidden, in_features)), bias)

        self._linear_1 = layer("linear_1", len(vision.states) * vision.hidden_size)
        self._linear_2 = layer("linear_2", hidden)
        self._activation = activation(vision.projector_hidden_act, "projector_hidden_act")

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, num_states * tower_hidden] -> [num_tokens, hidden]."""
        return self._linear_2(self._activation(self._linear_1(x)))


MODELS = {"LlavaForConditionalGeneration": LlavaForConditionalGeneration}
