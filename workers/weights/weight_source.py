"""What a model needs from a checkpoint, whatever its format."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

WHOLE = slice(None)


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


def missing_tensor(name: str, file: object) -> str:
    """The message for a tensor that is not there."""
    return f"tensor {name} is missing in {file}"


def wrong_shape(name: str, file: object, found: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    """The message for a tensor that does not fit the config."""
    return f"tensor {name} in {file} has shape {list(found)}, the config says {list(wanted)}"
