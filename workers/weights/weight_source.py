"""What a model needs from a checkpoint, whatever its format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from airside.workers.linear import Linear, make_linear

WHOLE = slice(None)


class MatrixPart(NamedTuple):
    """`tensor[rows, columns]` of a matrix of `shape`, [out_features, in_features]."""

    name: str
    shape: tuple[int, int]
    rows: slice = WHOLE
    columns: slice = WHOLE


class WeightSource(Protocol):
    """Tensors by their Hugging Face names, read slice by slice in the dtype that the model runs in."""

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds this tensor."""
        ...

    def read(self, name: str, shape: tuple[int, ...], rows: slice = WHOLE, columns: slice = WHOLE) -> Tensor:
        """`tensor[rows]`, or `tensor[rows, columns]` of a matrix, contiguous, on the model's device.

        Args:
            shape: what the whole tensor must have.
        Raises:
            CheckpointError: no such tensor, or another shape; names the tensor and the file.
        """
        ...

    def linear(self, parts: Sequence[MatrixPart], bias: Tensor | None = None, held: Tensor | None = None) -> Linear:
        """The product with a decoder's weight: its parts one below the other, quantised if the engine's weights are.

        Args:
            parts: all of as many columns.
            bias: [rows of all parts].
            held: the same rows where the caller has read them already and keeps them.
        Raises:
            CheckpointError: as `read`.
        """
        ...


def read_linear(
    source: WeightSource,
    weight_format: str | None,
    parts: Sequence[MatrixPart],
    bias: Tensor | None,
    held: Tensor | None,
) -> Linear:
    """`WeightSource.linear` from tensors that are read; `weight_format` as in `make_linear`."""
    if held is None:
        held = torch.cat([source.read(part.name, part.shape, part.rows, part.columns) for part in parts])
    return make_linear(held, bias, weight_format)


def missing_tensor(name: str, file: object) -> str:
    """The message for a tensor that is not there."""
    return f"tensor {name} is missing in {file}"


def wrong_shape(name: str, file: object, found: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    """The message for a tensor that does not fit the config."""
    return f"tensor {name} in {file} has shape {list(found)}, the config says {list(wanted)}"
