"""The vision tower and connector as one function of their weights, which keep the names they have in the checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

HIDDEN = 192
HEADS = 3
LAYERS = 6
PATCH_PX = 16
GRID = 8  # patches along a side
SHUFFLE = 2  # patches along a side of one image token
TOKENS = 16
TEXT_HIDDEN = 576
EPSILON = 1e-6
CONNECTOR = "model.connector.modality_projection.proj.weight"
EARLY, LATE = 2, 4  # layers after which `Seen` shows the patches
LINEAR = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "mlp.fc1", "mlp.fc2")


class Seen(NamedTuple):
    """What the tower makes of pictures.

    tokens: [num_pictures, 16, 576], what the text model gets; early, late: [num_pictures, 64, 192], patches on the way.
    """

    tokens: Tensor
    early: Tensor
    late: Tensor


class Tower(nn.Module):
    """Float32 weights, bfloat16 matrix products.

    Args:
        weights: the checkpoint's tensors, `model.vision_model.*` and `model.connector.*`.
    """

    def __init__(self, weights: dict[str, Tensor], compiled: bool = True) -> None:
        super().__init__()
        self._names = sorted(weights)
        self.weights = nn.ParameterList([nn.Parameter(weights[name].float()) for name in self._names])
        self._see = torch.compile(_see) if compiled else _see

    @classmethod
    def from_file(cls, path: Path, compiled: bool = True) -> Tower:
        """The tower that a safetensors file holds."""
        return cls(load_file(path), compiled)

    @classmethod
    def untrained(cls, compiled: bool = True) -> Tower:
        """Random weights of the right shapes."""
        return cls({name: _start(name, shape) for name, shape in _shapes().items()}, compiled)

    def named(self) -> dict[str, Tensor]:
        """The weights under their names in the checkpoint."""
        return dict(zip(self._names, self.weights, strict=True))

    def features(self, pixels: Tensor) -> Tensor:
        """What the connector's matrix is given: [num_pictures, 16, 768]."""
        identity = torch.eye(HIDDEN * SHUFFLE**2)
        return _see(pixels, {**self.named(), CONNECTOR: identity})[0]

    def forward(self, pixels: Tensor) -> Seen:
        """`pixels`: [num_pictures, 3, 128, 128] from -1 to 1."""
        return Seen(*self._see(pixels, self.named()))


def _see(pixels: Tensor, weights: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    vision = {name.removeprefix("model.vision_model."): tensor for name, tensor in weights.items()}
    number = pixels.shape[0]
    patches = pixels.view(number, 3, GRID, PATCH_PX, GRID, PATCH_PX).permute(0, 2, 4, 1, 3, 5)
    kernel = vision["embeddings.patch_embedding.weight"].reshape(HIDDEN, -1)
    x = _linear(patches.reshape(number, GRID * GRID, -1), kernel, vision["embeddings.patch_embedding.bias"])
    x = x + vision["embeddings.position_embedding.weight"]
    shown = []
    for number_of_layer in range(LAYERS):
        prefix = f"encoder.layers.{number_of_layer}."
        x = _layer(x, {name.removeprefix(prefix): t for name, t in vision.items() if name.startswith(prefix)})
        if number_of_layer in (EARLY, LATE):
            shown.append(x)
    x = _norm(x, vision["post_layernorm.weight"], vision["post_layernorm.bias"])
    side = GRID // SHUFFLE
    x = x.view(number, side, SHUFFLE, side, SHUFFLE, HIDDEN).permute(0, 1, 3, 2, 4, 5).reshape(number, TOKENS, -1)
    return _linear(x, weights[CONNECTOR], None), shown[0], shown[1]


def _layer(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    number, patches = x.shape[:2]
    h = _norm(x, weights["layer_norm1.weight"], weights["layer_norm1.bias"])
    qkv = [f"self_attn.{name}_proj" for name in "qkv"]
    weight, bias = (torch.cat([weights[f"{name}.{kind}"] for name in qkv]) for kind in ("weight", "bias"))
    split = _linear(h, weight, bias).to(torch.bfloat16).view(number, patches, 3, HEADS, HIDDEN // HEADS)
    q, k, v = split.permute(2, 0, 3, 1, 4)
    scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(HIDDEN // HEADS)
    mixed = (scores.softmax(-1).to(torch.bfloat16) @ v).transpose(1, 2).reshape(number, patches, HIDDEN)
    x = x + _linear(mixed, weights["self_attn.out_proj.weight"], weights["self_attn.out_proj.bias"])
    h = _norm(x, weights["layer_norm2.weight"], weights["layer_norm2.bias"])
    h = functional.gelu(_linear(h, weights["mlp.fc1.weight"], weights["mlp.fc1.bias"]), approximate="tanh")
    return x + _linear(h, weights["mlp.fc2.weight"], weights["mlp.fc2.bias"])


def _norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x, (HIDDEN,), weight, bias, EPSILON)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = functional.linear(x.to(torch.bfloat16), weight.to(torch.bfloat16)).float()
    return product if bias is None else product + bias


def _shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of all weights."""
    wide = 4 * HIDDEN
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.patch_embedding.weight": (HIDDEN, 3, PATCH_PX, PATCH_PX),
        "embeddings.patch_embedding.bias": (HIDDEN,),
        "embeddings.position_embedding.weight": (GRID * GRID, HIDDEN),
        "post_layernorm.weight": (HIDDEN,),
        "post_layernorm.bias": (HIDDEN,),
    }
    for layer in range(LAYERS):
        prefix = f"encoder.layers.{layer}."
        for name in LINEAR:
            rows, columns = {"mlp.fc1": (wide, HIDDEN), "mlp.fc2": (HIDDEN, wide)}.get(name, (HIDDEN, HIDDEN))
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            shapes[f"{prefix}{name}.bias"] = (rows,)
        for norm in ("layer_norm1", "layer_norm2"):
            shapes[f"{prefix}{norm}.weight"] = shapes[f"{prefix}{norm}.bias"] = (HIDDEN,)
    named: dict[str, tuple[int, ...]] = {f"model.vision_model.{name}": shape for name, shape in shapes.items()}
    named[CONNECTOR] = (TEXT_HIDDEN, HIDDEN * SHUFFLE**2)
    return named


def _start(name: str, shape: tuple[int, ...]) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape) if "norm" in name and name.endswith("weight") else torch.zeros(shape)
    return torch.randn(shape) / math.sqrt(math.prod(shape[1:]))
