"""Vision towers for pictures of one size: CLIP (Radford et al. 2021, arXiv 2103.00020), and SigLIP (Zhai et al. 2023,
arXiv 2303.15343), which has no class token, and no norm before its first layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from airside.workers.model_configs.vision_tower import TowerConfig
from airside.workers.models.vision_layers import LayerNorm, VisionLayer
from airside.workers.weights.weight_source import WeightSource


class VisionTransformer:
    """Pictures to the states of their patches.

    Args:
        prefix: of the tower's tensors, with its dot.
        has_class_token: CLIP; otherwise SigLIP.
        num_layers: how many of the layers are needed; None: all. The others are not read.
    Raises:
        CheckpointError: a tensor is missing or has the wrong shape, or an activation is not supported.
    """

    def __init__(
        self,
        weights: WeightSource,
        prefix: str,
        config: TowerConfig,
        *,
        has_class_token: bool,
        num_layers: int | None = None,
    ) -> None:
        hidden, size = config.hidden_size, config.patch_size
        self._config = config
        at = f"{prefix}embeddings"
        name = f"{at}.patch_embedding"
        self._patch_weight = weights.read(f"{name}.weight", (hidden, config.num_channels, size, size))
        self._patch_bias = None if has_class_token else weights.read(f"{name}.bias", (hidden,))
        self._class_token = weights.read(f"{at}.class_embedding", (hidden,)) if has_class_token else None
        num_positions = config.patches_per_side**2 + has_class_token
        self._positions = weights.read(f"{at}.position_embedding.weight", (num_positions, hidden))
        self._norm_before = LayerNorm(weights, f"{prefix}pre_layrnorm", config) if has_class_token else None
        used = range(config.num_layers if num_layers is None else num_layers)
        self._layers = [VisionLayer(weights, f"{prefix}encoder.layers.{layer_id}", config) for layer_id in used]

    def states(self, pixels: Tensor, wanted: Sequence[int]) -> list[Tensor]:
        """States by number: 0 is what goes into the first layer, and n what comes out of layer n.

        Args:
            pixels: [num_pictures, channels, image_size, image_size], any float dtype.
            wanted: numbers of states, none above `num_layers`.
        Returns: for each of `wanted`, [num_pictures, num_tokens, hidden]: patches row by row, a class token first.
        Raises:
            ValueError: pictures of another size.
        """
        x = self._embed(pixels)
        kept = {0: x}
        for number, layer in enumerate(self._layers, start=1):
            x = layer(x)
            if number in wanted:
                kept[number] = x
        return [kept[number] for number in wanted]

    def _embed(self, pixels: Tensor) -> Tensor:
        side = self._config.image_size
        if pixels.shape[2:] != (side, side):
            raise ValueError(f"a picture of {tuple(pixels.shape[2:])} pixels, for a tower that takes {(side, side)}")
        patches = functional.conv2d(
            pixels.to(self._patch_weight.dtype), self._patch_weight, self._patch_bias, self._config.patch_size
        )
        x = patches.flatten(2).transpose(1, 2)
        if self._class_token is not None:
            x = torch.cat([self._class_token.expand(len(x), 1, -1), x], dim=1)
        x = x + self._positions
        return x if self._norm_before is None else self._norm_before(x)
