"""The blocks of a GGUF tensor in a format that has kernels."""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType, ReaderTensor
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from airside.workers.ops import GGUF_BLOCK

_FLOATS = {GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16, GGMLQuantizationType.F64}
_KEPT = {
    GGMLQuantizationType.Q8_0: "q8_0",
    GGMLQuantizationType.Q4_0: "q4_0",
    GGMLQuantizationType.Q4_1: "q4_1",
    GGMLQuantizationType.Q4_K: "q4_1",
}
BLOCK_BYTES = {"q8_0": 34, "q4_0": 18, "q4_1": 20}
_SUPER_BLOCKS = 8
"""Blocks in one of Q4_K's super-blocks."""


def block_format(tensor: ReaderTensor) -> str | None:
    """The format that `kept_blocks` returns, or None for a tensor of floats."""
    return None if tensor.tensor_type in _FLOATS else _KEPT.get(tensor.tensor_type, "q8_0")


def kept_blocks(tensor: ReaderTensor) -> NDArray[np.uint8]:
    """[out_features, bytes of a row], in `block_format`.

    Q8_0, Q4_0 and Q4_1 are as in the file. Q4_K is Q4_1 with its scales and minima multiplied out and rounded to
    float16, an error far below that of its 4 bits. Other types are quantised once more, to Q8_0.
    """
    if tensor.tensor_type is GGMLQuantizationType.Q4_K:
        return q4_1_of_q4_k(tensor.data)
    if tensor.tensor_type in _KEPT:
        return np.asarray(tensor.data)
    values = dequantize(tensor.data, tensor.tensor_type)
    return np.asarray(quantize(values, GGMLQuantizationType.Q8_0))


def columns_of(blocks: NDArray[np.uint8], kind: str, columns: slice) -> NDArray[np.uint8]:
    """The blocks of some inputs; `columns` begins and ends between blocks."""
    if columns.start is None and columns.stop is None:
        return blocks
    size = BLOCK_BYTES[kind]
    return blocks[:, columns.start // GGUF_BLOCK * size : columns.stop // GGUF_BLOCK * size]


def q4_1_of_q4_k(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """llama.cpp's block_q4_K: d, dmin, 8 scales and 8 minima of 6 bits, and 256 nibbles, 32 low and 32 high by turns.

    Args:
        rows: [out_features, super-blocks * 144].
    Returns: [out_features, blocks * 20].
    """
    supers = rows.reshape(-1, 144)
    halves = np.ascontiguousarray(supers[:, :4]).view(np.float16).astype(np.float32)
    scales, minima = _six_bits(supers[:, 4:16])
    d = (halves[:, :1] * scales).astype(np.float16)
    m = (-halves[:, 1:] * minima).astype(np.float16)
    pairs = supers[:, 16:].reshape(-1, _SUPER_BLOCKS // 2, 1, GGUF_BLOCK)
    nibbles = np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(-1, _SUPER_BLOCKS, 2, GGUF_BLOCK // 2)
    values = nibbles[:, :, 0] | nibbles[:, :, 1] << 4
    blocks = np.concatenate([d[..., None].view(np.uint8), m[..., None].view(np.uint8), values], axis=2)
    return blocks.reshape(rows.shape[0], -1)


def _six_bits(packed: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scales and minima, [super-blocks, 8] each, of [super-blocks, 12]."""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, rest & 15 | first >> 6 << 4], axis=1)
    minima = np.concatenate([second & 63, rest >> 4 | second >> 6 << 4], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)
