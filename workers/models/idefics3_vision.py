"""Idefics3's vision tower: SigLIP (Zhai et al. 2023, arXiv 2303.15343) for pictures of any shape."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from airside.workers.model_configs.idefics3 import Idefics3VisionConfig
from airside.workers.models.vision_layers import LayerNorm, VisionLayer
from airside.workers.weights.weight_source import WeightSource


class VisionTower:
    """Patches to features. Weights are read from the tensors below `prefix`."""

    def __init__(self, weights: WeightSource, prefix: str, config: Idefics3VisionConfig) -> None:
        size, hidden = config.patch_size, config.hidden_size
        self._patch_size = size
        self._per_side = config.patches_per_side
        name = f"{prefix}.embeddings.patch_embedding"
        self._patch_weight = weights.read(f"{name}.weight", (hidden, config.num_channels, size, size))
        self._patch_bias = weights.read(f"{name}.bias", (hidden,))
        positions = f"{prefix}.embeddings.position_embedding.weight"
        self._positions = weights.read(positions, (self._per_side**2, hidden))
        self._layers = [
            VisionLayer(weights, f"{prefix}.encoder.layers.{layer_id}", config) for layer_id in range(config.num_layers)
        ]
        self._norm = LayerNorm(weights, f"{prefix}.post_layernorm", config)

    def __call__(self, pixels: Tensor, mask: Tensor | None) -> Tensor:
        """Features of every patch, padded ones included.

        Args:
            pixels: [num_tiles, channels, height, width], any float dtype.
            mask: [num_tiles, height, width] bool, True where there is picture; None: everywhere.
        Returns: [num_tiles, height / patch, width / patch, hidden].
        """
        patches = functional.conv2d(
            pixels.to(self._patch_weight.dtype), self._patch_weight, self._patch_bias, self._patch_size
        )
        tiles, hidden, rows, columns = patches.shape
        real = self._real_patches(mask, tiles, rows, columns)
        x = patches.flatten(2).transpose(1, 2)
        x = x + functional.embedding(position_ids(real, self._per_side), self._positions)
        visible = None if bool(real.all()) else real.view(tiles, 1, 1, -1)
        for layer in self._layers:
            x = layer(x, visible)
        return self._norm(x).view(tiles, rows, columns, hidden)

    def _real_patches(self, mask: Tensor | None, tiles: int, rows: int, columns: int) -> Tensor:
        """[num_tiles, rows, columns] bool: patches with at least one pixel of picture."""
        if mask is None:
            return torch.ones((tiles, rows, columns), dtype=torch.bool, device=self._positions.device)
        size = self._patch_size
        cut = mask[:, : rows * size, : columns * size]
        return cut.reshape(tiles, rows, size, columns, size).any(dim=4).any(dim=2)


def position_ids(real: Tensor, per_side: int) -> Tensor:
    """The learnt position of each patch: its place in the picture, as a fraction, on the grid of training.

    Args:
        real: [num_tiles, rows, columns] bool, each tile's picture in its upper left corner.
        per_side: patches per side of the training grid.
    Returns: [num_tiles, rows * columns] int64; 0 for padding.
    """
    edges = torch.arange(1 / per_side, 1.0, 1 / per_side, device=real.device)

    def buckets(num_real: Tensor, length: int) -> Tensor:
        steps = torch.arange(length, dtype=torch.float32, device=real.device)
        # Multiplied by the reciprocal, and not divided: the last bit decides the bucket at an edge.
        fractions = (steps[None, :] * (1.0 / num_real)[:, None]).clamp(max=1.0 - 1e-6)
        return torch.bucketize(fractions, edges, right=True)

    row_buckets = buckets(real[:, :, 0].sum(dim=1), real.shape[1])
    column_buckets = buckets(real[:, 0, :].sum(dim=1), real.shape[2])
    ids = row_buckets[:, :, None] * per_side + column_buckets[:, None, :]
    return torch.where(real, ids, 0).flatten(1)
