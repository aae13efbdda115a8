"""A llama.cpp checkpoint: dequantised, under Hugging Face names."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from airside.workers import ops
from airside.workers.linear import Linear, PackedLinear, make_linear
from airside.workers.model_config import CheckpointError, ModelConfig
from airside.workers.weights.gguf_blocks import block_format, columns_of, kept_blocks
from airside.workers.weights.gguf_metadata import gguf_config, open_gguf
from airside.workers.weights.load_times import LoadTimes
from airside.workers.weights.weight_source import WHOLE, MatrixPart, missing_tensor, wrong_shape

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_HF_NAMES = {theirs: ours for ours, theirs in _NAMES.items()}
_HF_LAYER_NAMES = {theirs: ours for ours, theirs in _LAYER_NAMES.items()}
Number = TypeVar("Number", np.float32, np.uint8)
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


class GgufFile:
    """A WeightSource over one .gguf file.

    Args:
        dtype, device: of the tensors returned.
        weight_format: of linear layers' weights, as in `make_linear`.
        times: gets the seconds of reading and packing.
        keeps_blocks: linear layers multiply with the file's own blocks instead.
    Raises:
        CheckpointError: not a GGUF file, or an unsupported architecture.
    """

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype,
        device: torch.device,
        weight_format: str | None = None,
        times: LoadTimes | None = None,
        *,
        keeps_blocks: bool = False,
    ) -> None:
        self._path = path
        self._dtype = dtype
        self._device = device
        self._weight_format = weight_format
        self._keeps_blocks = keeps_blocks
        self._times = times or LoadTimes()
        reader: GGUFReader = open_gguf(path)
        self.config: ModelConfig = gguf_config(reader, path)
        self._tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}

    def has(self, name: str) -> bool:
        return gguf_name(name) in self._tensors

    def read(self, name: str, shape: tuple[int, ...], rows: slice = WHOLE, columns: slice = WHOLE) -> Tensor:
        source = self._find(name, shape)
        array: NDArray[np.float32] = dequantize(source.data, source.tensor_type).astype(np.float32).reshape(shape)
        heads = self._rotated_heads(name)
        if heads is not None:
            array = _half_split(array, heads)
        part = array[rows] if len(shape) == 1 or columns == WHOLE else array[rows, columns]
        return torch.from_numpy(np.array(part)).to(self._device, self._dtype)

    def table(self, name: str, shape: tuple[int, int], rows: slice = WHOLE) -> Tensor:
        return self.read(name, shape, rows)  # its blocks are no rows to look up

    def linear(self, parts: Sequence[MatrixPart], bias: Tensor | None = None) -> Linear:
        if not self._keeps_blocks:
            return self._multiply(parts, bias, self._weight_format)
        products: list[Linear] = []
        rows = 0
        for kind, group in itertools.groupby(parts, self._block_format):
            own = list(group)
            end = rows + sum(len(range(*part.rows.indices(part.shape[0]))) for part in own)
            own_bias = None if bias is None else bias[rows:end]
            if kind is None:
                products.append(self._multiply(own, own_bias, None))
            else:
                with self._times.phase("read"):
                    blocks = torch.from_numpy(np.concatenate([self._blocks(part, kind) for part in own]))
                with self._times.phase("pack"):
                    products.append(PackedLinear(ops.pack_blocks(blocks, kind), own_bias))
            rows = end
        return products[0] if len(products) == 1 else lambda x: torch.cat([product(x) for product in products], dim=1)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, under its Hugging Face name. Raises KeyError for one that a Llama does not have."""
        for source in self._tensors.values():
            name = hugging_face_name(source.name)
            yield name, self.read(name, tuple(int(size) for size in reversed(source.shape)))

    def _multiply(self, parts: Sequence[MatrixPart], bias: Tensor | None, weight_format: str | None) -> Linear:
        """With the parts dequantised, and then held as `make_linear` says."""
        with self._times.phase("read"):
            read = [self.read(part.name, part.shape, part.rows, part.columns) for part in parts]
            weight = torch.cat(read) if len(read) > 1 else read[0]
        with self._times.phase("pack"):
            return make_linear(weight, bias, weight_format)

    def _find(self, name: str, shape: tuple[int, ...]) -> ReaderTensor:
        source = self._tensors.get(gguf_name(name) or "")
        if source is None:
            raise CheckpointError(missing_tensor(f"{name} ({gguf_name(name)})", self._path))
        found = tuple(int(size) for size in reversed(source.shape))
        if found != shape:
            raise CheckpointError(wrong_shape(name, self._path, found, shape))
        return source

    def _block_format(self, part: MatrixPart) -> str | None:
        """None: this part is multiplied in the model's dtype, being of floats, or cut within a block."""
        cuts = (part.columns.start or 0, part.columns.stop or 0)
        if any(cut % ops.GGUF_BLOCK for cut in cuts):
            return None
        return block_format(self._find(part.name, part.shape))

    def _blocks(self, part: MatrixPart, kind: str) -> NDArray[np.uint8]:
        blocks = kept_blocks(self._find(part.name, part.shape))
        heads = self._rotated_heads(part.name)
        if heads is not None:
            blocks = _half_split(blocks, heads)
        return columns_of(blocks[part.rows], kind, part.columns)

    def _rotated_heads(self, name: str) -> int | None:
        """How many heads this tensor's rows make when they are in llama.cpp's order."""
        if ".q_proj." in name:
            return self.config.num_heads
        return self.config.num_kv_heads if ".k_proj." in name else None


def gguf_name(name: str) -> str | None:
    """llama.cpp's name of a Hugging Face tensor, or None when it has none."""
    stem, _, kind = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    layer = _LAYER.fullmatch(stem)
    if layer is None or layer[2] not in _LAYER_NAMES:
        return None
    return f"blk.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{kind}"


def hugging_face_name(name: str) -> str:
    """The inverse of `gguf_name`. Raises KeyError for a name that has none."""
    match name.split("."):
        case ["blk", layer, part, kind]:
            return f"model.layers.{layer}.{_HF_LAYER_NAMES[part]}.{kind}"
        case [part, kind]:
            return f"{_HF_NAMES[part]}.{kind}"
        case _:
            raise KeyError(name)


def _half_split(rows: NDArray[Number], num_heads: int) -> NDArray[Number]:
    """Undoes llama.cpp's interleaving of each head's rotary pairs.

    Their head rows are x0 y0 x1 y1 ..., where (x, y) is a rotary pair; ours are x0 x1 ... y0 y1 ...
    """
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
