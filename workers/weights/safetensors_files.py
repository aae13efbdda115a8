"""A checkpoint folder of safetensors files: one file, or several with an index."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from airside.workers.linear import Linear
from airside.workers.model_config import CheckpointError
from airside.workers.weights.weight_source import WHOLE, MatrixPart, missing_tensor, read_linear, wrong_shape


class SafetensorsFiles:
    """A WeightSource that reads from disk only the slices asked for.

    Args:
        folder: holds `model.safetensors.index.json` and the files it names, or `model.safetensors`.
        dtype, device: of the tensors returned.
        weight_format: of linear layers' weights, as in `make_linear`.
    Raises:
        CheckpointError: no weights there, or a file of the index is missing or damaged.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, weight_format: str | None = None
    ) -> None:
        self._folder = folder
        self._dtype = dtype
        self._device = device
        self._weight_format = weight_format
        self._open: dict[str, Any] = {}  # Any: safetensors' file handle has no stub
        self._file_of = self._index()

    def _index(self) -> dict[str, str]:
        index = self._folder / "model.safetensors.index.json"
        if index.exists():
            try:
                return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{index} cannot be read: {error!r}") from error
        if not (self._folder / "model.safetensors").exists():
            raise CheckpointError(f"{self._folder} holds neither model.safetensors nor model.safetensors.index.json")
        return dict.fromkeys(self._handle("model.safetensors").keys(), "model.safetensors")

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            path = self._folder / file
            try:
                self._open[file] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
        return self._open[file]

    def has(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str, shape: tuple[int, ...], rows: slice = WHOLE, columns: slice = WHOLE) -> Tensor:
        file = self._file_of.get(name)
        if file is None:
            raise CheckpointError(missing_tensor(name, self._folder / "model.safetensors"))
        handle = self._handle(file)
        try:
            part = handle.get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(missing_tensor(name, self._folder / file)) from error
        found = tuple(part.get_shape())
        if found != shape:
            raise CheckpointError(wrong_shape(name, self._folder / file, found, shape))
        tensor: Tensor = part[rows] if len(shape) == 1 or columns == WHOLE else part[rows, columns]
        return tensor.to(self._device, self._dtype).contiguous()

    def linear(self, parts: Sequence[MatrixPart], bias: Tensor | None = None, held: Tensor | None = None) -> Linear:
        return read_linear(self, self._weight_format, parts, bias, held)
