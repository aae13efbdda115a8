"""Idefics3's vision tower: SigLIP (Zhai et al. 2023, arXiv 2303.15343) for pictures of any shape."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from airside.workers.linear import Linear, make_linear
from airside.workers.model_config import CheckpointError, VisionConfig
from airside.workers.weights.weight_source import WeightSource

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_pytorch_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "gelu": functional.gelu,
}


class VisionTower:
    """Patches to features. Weights are read from the tensors below `prefix`."""

    def __init__(self, weights: WeightSource, prefix: str, config: VisionConfig) -> None:
        size, hidden = config.patch_size, config.hidden_size
        self._patch_size = size
        self._per_side = config.image_size // size
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


class LayerNorm:
    """Layer norm with weight and bias over the last axis."""

    def __init__(self, weights: WeightSource, name: str, config: VisionConfig) -> None:
        self._shape = (config.hidden_size,)
        self._weight = weights.read(f"{name}.weight", self._shape)
        self._bias = weights.read(f"{name}.bias", self._shape)
        self._eps = config.layer_norm_eps

    def __call__(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self._shape, self._weight, self._bias, self._eps)


class VisionLayer:
    """A pre-norm transformer layer with attention in both directions."""

    def __init__(self, weights: WeightSource, prefix: str, config: VisionConfig) -> None:
        activation = _ACTIVATIONS.get(config.hidden_act)
        if activation is None:
            known = ", ".join(_ACTIVATIONS)
            raise CheckpointError(f"vision hidden_act {config.hidden_act} is not supported; supported: {known}")
        self._activation = activation
        self._num_heads = config.num_heads
        self._head_dim = config.hidden_size // config.num_heads
        hidden, inner = config.hidden_size, config.intermediate_size
        self._norm1 = LayerNorm(weights, f"{prefix}.layer_norm1", config)
        self._norm2 = LayerNorm(weights, f"{prefix}.layer_norm2", config)
        attention = f"{prefix}.self_attn"
        self._qkv = _biased_linear(weights, [f"{attention}.{p}_proj" for p in "qkv"], hidden, hidden)
        self._out = _biased_linear(weights, [f"{attention}.out_proj"], hidden, hidden)
        self._fc1 = _biased_linear(weights, [f"{prefix}.mlp.fc1"], inner, hidden)
        self._fc2 = _biased_linear(weights, [f"{prefix}.mlp.fc2"], hidden, inner)

    def __call__(self, x: Tensor, visible: Tensor | None) -> Tensor:
        """[num_tiles, num_patches, hidden] -> the same shape; visible: [num_tiles, 1, 1, num_patches] bool."""
        tiles, patches, hidden = x.shape
        qkv = self._qkv(self._norm1(x).view(-1, hidden)).view(tiles, patches, 3, self._num_heads, self._head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        x = x + self._out(mixed.transpose(1, 2).reshape(-1, hidden)).view_as(x)
        inner = self._activation(self._fc1(self._norm2(x).view(-1, hidden)))
        return x + self._fc2(inner).view_as(x)


def _biased_linear(weights: WeightSource, names: list[str], out_features: int, in_features: int) -> Linear:
    weight = torch.cat([weights.read(f"{name}.weight", (out_features, in_features)) for name in names])
    return make_linear(weight, torch.cat([weights.read(f"{name}.bias", (out_features,)) for name in names]))
