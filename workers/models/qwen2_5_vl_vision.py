"""Qwen2.5-VL's vision tower: patches of a picture of any size; most layers attend within windows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from airside.workers import ops
from airside.workers.linear import make_linear
from airside.workers.model_configs.qwen2_5_vl import Qwen25VisionConfig
from airside.workers.models.vision_layers import biased_linear
from airside.workers.weights.weight_source import WeightSource

_EPS = 1e-6  # of all norms

Grid = tuple[int, int, int]
"""Patches of a picture: frames, rows, columns."""


@dataclass(frozen=True, slots=True)
class Windows:
    """The tokens of a picture, window by window, small windows first.

    All windows but those at the right and lower edges have one size, so that there are at most four sizes.
    """

    order: Tensor  # [num_tokens] int64: tokens of the picture, row by row, in the order of windows
    runs: tuple[tuple[int, int], ...]  # (windows, tokens of each), of each size in turn


def cut_windows(rows: int, columns: int, side: int) -> Windows:
    """Cuts `rows` x `columns` tokens into squares of `side` x `side`, from the upper left corner on."""
    tokens = torch.arange(rows * columns).view(rows, columns)
    windows = [
        tokens[top : top + side, left : left + side].flatten()
        for top in range(0, rows, side)
        for left in range(0, columns, side)
    ]
    windows.sort(key=len)
    sizes = [len(window) for window in windows]
    return Windows(torch.cat(windows), tuple((sizes.count(size), size) for size in sorted(set(sizes))))


def patch_places(rows: int, columns: int, merge_size: int) -> Tensor:
    """[rows * columns, 2] int64: row and column of each patch; patches come square by square of `merge_size`."""
    squares = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), dim=-1)
    squares = squares.view(rows // merge_size, merge_size, columns // merge_size, merge_size, 2)
    return squares.transpose(1, 2).reshape(-1, 2)


class VisionTower:
    """Patches to embeddings of tokens. Weights are read from the tensors below `prefix`.

    Args:
        out_features: of the embeddings.
    """

    def __init__(self, weights: WeightSource, prefix: str, config: Qwen25VisionConfig, out_features: int) -> None:
        self._config = config
        hidden, size = config.hidden_size, config.patch_size
        shape = (hidden, config.num_channels, config.temporal_patch_size, size, size)
        # A convolution whose patches do not overlap is a product.
        self._patches = make_linear(weights.read(f"{prefix}.patch_embed.proj.weight", shape).flatten(1))
        self._layers = [
            VisionLayer(weights, f"{prefix}.blocks.{layer_id}", config) for layer_id in range(config.num_layers)
        ]
        joined = hidden * config.merge_size**2
        self._norm = weights.read(f"{prefix}.merger.ln_q.weight", (hidden,))
        self._merge = biased_linear(weights, [f"{prefix}.merger.mlp.0"], joined, joined)
        self._out = biased_linear(weights, [f"{prefix}.merger.mlp.2"], out_features, joined)
        angles = config.hidden_size // config.num_heads // 2
        exponents = torch.arange(0, angles, 2, dtype=torch.float32) / angles
        self._frequencies = 1.0 / (config.rope_theta**exponents)  # radians per patch, of each pair of an axis

    def __call__(self, pixels: Tensor, grid: Grid) -> Tensor:
        """The embeddings of a picture's tokens, row by row.

        Args:
            pixels: [num_patches, patch_values], any float dtype; square by square of those that become one token.
            grid: one frame of rows and columns, multiples of `merge_size`.
        Returns: [num_patches / merge_size**2, out_features].
        """
        frames, rows, columns = grid
        merge = self._config.merge_size
        if frames != 1 or rows % merge or columns % merge or pixels.shape[0] != rows * columns:
            raise ValueError(f"{pixels.shape[0]} patches do not make a picture of {frames} x {rows} x {columns}")
        windows = cut_windows(rows // merge, columns // merge, self._config.window_tokens)
        order = windows.order.to(pixels.device)
        x = self._patches(_reorder(pixels.to(self._norm.dtype), order, merge))
        turns = self._turns(_reorder(patch_places(rows, columns, merge).to(pixels.device), order, merge))
        whole = ((1, rows * columns),)
        in_windows = tuple((count, tokens * merge**2) for count, tokens in windows.runs)
        for layer_id, layer in enumerate(self._layers):
            x = layer(x, turns, whole if layer_id in self._config.full_attention_layers else in_windows)
        joined = ops.rms_norm(x, self._norm, _EPS).view(len(order), -1)
        merged = self._out(functional.gelu(self._merge(joined)))
        return torch.empty_like(merged).index_copy_(0, order, merged)

    def _turns(self, places: Tensor) -> Tensor:
        """[num_patches, 2] -> [2, num_patches, 1, head_dim] float32: cosine and sine; half of the pairs per axis."""
        angles = (places[:, :, None].float() * self._frequencies.to(places.device)).flatten(1)
        return torch.stack((angles.cos(), angles.sin())).repeat(1, 1, 2).unsqueeze(2)


class VisionLayer:
    """A pre-norm layer that attends in both directions, within runs of equally many patches."""

    def __init__(self, weights: WeightSource, prefix: str, config: Qwen25VisionConfig) -> None:
        self._num_heads = config.num_heads
        hidden, inner = config.hidden_size, config.intermediate_size
        self._norm1 = weights.read(f"{prefix}.norm1.weight", (hidden,))
        self._norm2 = weights.read(f"{prefix}.norm2.weight", (hidden,))
        self._qkv = biased_linear(weights, [f"{prefix}.attn.qkv"], 3 * hidden, hidden)
        self._out = biased_linear(weights, [f"{prefix}.attn.proj"], hidden, hidden)
        gate_up = [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"]
        self._gate_up = biased_linear(weights, gate_up, inner, hidden)
        self._down = biased_linear(weights, [f"{prefix}.mlp.down_proj"], hidden, inner)

    def __call__(self, x: Tensor, turns: Tensor, runs: tuple[tuple[int, int], ...]) -> Tensor:
        """[num_patches, hidden] -> the same shape.

        Args:
            turns: cosine and sine of each patch.
            runs: (count, length): so many times so many patches attend to one another, run after run.
        """
        patches = x.shape[0]
        q, k, v = self._qkv(ops.rms_norm(x, self._norm1, _EPS)).view(patches, 3, self._num_heads, -1).unbind(1)
        q, k = _rotate(q, turns), _rotate(k, turns)
        x = x + self._out(_attend(q, k, v, runs).view(patches, -1))
        return x + self._down(ops.silu_and_mul(self._gate_up(ops.rms_norm(x, self._norm2, _EPS))))


def _attend(q: Tensor, k: Tensor, v: Tensor, runs: tuple[tuple[int, int], ...]) -> Tensor:
    """[num_patches, num_heads, head_dim] -> the same shape, contiguous; `runs` as in `VisionLayer`."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    begin = 0
    for count, length in runs:
        end = begin + count * length
        parts = [heads[begin:end].view(count, length, *heads.shape[1:]).transpose(1, 2) for heads in (q, k, v)]
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        out[begin:end] = mixed.transpose(1, 2).reshape(end - begin, *out.shape[1:])
        begin = end
    return out


def _rotate(heads: Tensor, turns: Tensor) -> Tensor:
    """[num_patches, num_heads, head_dim] turned, in float32; pairs are half a head apart."""
    wide = heads.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * turns[0] + torch.cat((-second, first), dim=-1) * turns[1]).to(heads.dtype)


def _reorder(patches: Tensor, order: Tensor, merge_size: int) -> Tensor:
    """Rows of patches, the squares that become a token in another order."""
    return patches.view(len(order), merge_size**2, -1)[order].flatten(0, 1)
