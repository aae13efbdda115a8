"""What a model needs from a checkpoint, whatever its format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from airside.workers.linear import Linear

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

    def table(self, name: str, shape: tuple[int, int], rows: slice = WHOLE) -> Tensor:
        """`tensor[rows]` of a matrix of which few rows are read at a time; it may not be written to.

        It stays in its file where it can be used as it is there, so that only what is read takes memory.

        Raises:
            CheckpointError: as `read`.
        """
        ...

    def linear(self, parts: Sequence[MatrixPart], bias: Tensor | None = None) -> Linear:
        """The product with a decoder's weight: its parts one below the other, quantised if the engine's weights are.

        Args:
            parts: all of as many columns.
            bias: [rows of all parts].
        Raises:
            CheckpointError: as `read`.
        """
        ...


def missing_tensor(name: str, file: object) -> str:
    """The message for a tensor that is not there."""
    return f"tensor {name} is missing in {file}"


def wrong_shape(name: str, file: object, found: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    """The message for a tensor that does not fit the config."""
    return f"tensor {name} in {file} has shape {list(found)}, the config says {list(wanted)}"
