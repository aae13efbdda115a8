"""What vision towers are made of: those of CLIP and SigLIP, and in part others."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from airside.workers.linear import Linear, make_linear
from airside.workers.model_config import CheckpointError
from airside.workers.model_configs.vision_tower import TowerConfig
from airside.workers.weights.weight_source import WeightSource

Activation = Callable[[Tensor], Tensor]


def _quick_gelu(x: Tensor) -> Tensor:
    """The sigmoid approximation of GELU (Hendrycks & Gimpel 2016, arXiv 1606.08415)."""
    return x * torch.sigmoid(1.702 * x)


_ACTIVATIONS: dict[str, Activation] = {
    "gelu_pytorch_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "gelu": functional.gelu,
    "quick_gelu": _quick_gelu,
}


def activation(name: str, key: str) -> Activation:
    """The activation of that name in the config. Raises CheckpointError, which names the config's `key`."""
    found = _ACTIVATIONS.get(name)
    if found is None:
        raise CheckpointError(f"{key} {name} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return found


def biased_linear(weights: WeightSource, names: list[str], out_features: int, in_features: int) -> Linear:
    """Products with the weights of `names`, each with a bias, one behind the other in one matrix."""
    weight = torch.cat([weights.read(f"{name}.weight", (out_features, in_features)) for name in names])
    return make_linear(weight, torch.cat([weights.read(f"{name}.bias", (out_features,)) for name in names]))


class LayerNorm:
    """Layer norm with weight and bias over the last axis."""

    def __init__(self, weights: WeightSource, name: str, config: TowerConfig) -> None:
        self._shape = (config.hidden_size,)
        self._weight = weights.read(f"{name}.weight", self._shape)
        self._bias = weights.read(f"{name}.bias", self._shape)
        self._eps = config.layer_norm_eps

    def __call__(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self._shape, self._weight, self._bias, self._eps)


class VisionLayer:
    """A pre-norm transformer layer with attention in both directions."""

    def __init__(self, weights: WeightSource, prefix: str, config: TowerConfig) -> None:
        self._activation = activation(config.hidden_act, "vision_config.hidden_act")
        self._num_heads = config.num_heads
        self._head_dim = config.hidden_size // config.num_heads
        hidden, inner = config.hidden_size, config.intermediate_size
        self._norm1 = LayerNorm(weights, f"{prefix}.layer_norm1", config)
        self._norm2 = LayerNorm(weights, f"{prefix}.layer_norm2", config)
        attention = f"{prefix}.self_attn"
        self._qkv = biased_linear(weights, [f"{attention}.{p}_proj" for p in "qkv"], hidden, hidden)
        self._out = biased_linear(weights, [f"{attention}.out_proj"], hidden, hidden)
        self._fc1 = biased_linear(weights, [f"{prefix}.mlp.fc1"], inner, hidden)
        self._fc2 = biased_linear(weights, [f"{prefix}.mlp.fc2"], hidden, inner)

    def __call__(self, x: Tensor, visible: Tensor | None = None) -> Tensor:
        """[num_tiles, num_patches, hidden] -> the same shape; visible: [num_tiles, 1, 1, num_patches] bool."""
        tiles, patches, hidden = x.shape
        qkv = self._qkv(self._norm1(x).view(-1, hidden)).view(tiles, patches, 3, self._num_heads, self._head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        x = x + self._out(mixed.transpose(1, 2).reshape(-1, hidden)).view_as(x)
        inner = self._activation(self._fc1(self._norm2(x).view(-1, hidden)))
        return x + self._fc2(inner).view_as(x)
