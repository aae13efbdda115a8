"""A checkpoint folder of safetensors files: one file, or several with an index."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from airside.workers import ops
from airside.workers.linear import Linear, PackedLinear, format_of, make_linear
from airside.workers.model_config import CheckpointError
from airside.workers.weights.load_times import LoadTimes
from airside.workers.weights.safetensors_file import SafetensorsFile
from airside.workers.weights.weight_source import WHOLE, MatrixPart, missing_tensor, wrong_shape

_BUFFER_BYTES = 8 << 20
"""How much of a linear layer's weight is read at a time, before it is packed."""


class SafetensorsFiles:
    """A WeightSource that reads from disk only the slices asked for.

    Args:
        folder: holds `model.safetensors.index.json` and the files it names, or `model.safetensors`.
        dtype, device: of the tensors returned.
        weight_format: of linear layers' weights, as in `make_linear`.
        times: gets the seconds of reading and packing.
    Raises:
        CheckpointError: no weights there, or a file of the index is missing or damaged.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        weight_format: str | None = None,
        times: LoadTimes | None = None,
    ) -> None:
        self._folder = folder
        self._dtype = dtype
        self._device = device
        self._weight_format = weight_format
        self._times = times or LoadTimes()
        self._open: dict[str, SafetensorsFile] = {}
        self._buffer = torch.empty(0, dtype=dtype)
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
        return dict.fromkeys(self._handle("model.safetensors").tensors, "model.safetensors")

    def _handle(self, file: str) -> SafetensorsFile:
        if file not in self._open:
            self._open[file] = SafetensorsFile(self._folder / file)
        return self._open[file]

    def has(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str, shape: tuple[int, ...], rows: slice = WHOLE, columns: slice = WHOLE) -> Tensor:
        file = self._find(name, shape)
        row_ids, part = _slice(shape, rows, columns)
        out = torch.empty(part, dtype=self._dtype, device=self._device)
        with self._times.phase("read"):
            file.read_into(out if shape else out[None], name, row_ids, None if columns == WHOLE else columns)
        return out

    def table(self, name: str, shape: tuple[int, int], rows: slice = WHOLE) -> Tensor:
        mapped = self._find(name, shape).mapped(name, range(shape[0])[rows])
        fits = mapped is not None and mapped.dtype is self._dtype and self._device.type == "cpu"
        return mapped if mapped is not None and fits else self.read(name, shape, rows)

    def linear(self, parts: Sequence[MatrixPart], bias: Tensor | None = None) -> Linear:
        stack = [_Part(self._find(part.name, part.shape), part) for part in parts]
        out_features, in_features = sum(len(part.rows) for part in stack), stack[0].num_columns
        if self._device.type != "cpu":
            weight = torch.empty((out_features, in_features), dtype=self._dtype, device=self._device)
            _read_rows(stack, 0, weight)
            return make_linear(weight, bias, self._weight_format)
        packed = ops.empty_packed(self._weight_format or format_of(self._dtype), out_features, in_features)
        for first, rows in self._by_parts(out_features, in_features):
            with self._times.phase("read"):
                _read_rows(stack, first, rows)
            with self._times.phase("pack"):
                ops.pack_rows(packed, first, rows)
        return PackedLinear(packed, bias)

    def _by_parts(self, out_features: int, in_features: int) -> Iterator[tuple[int, Tensor]]:
        """A few rows at a time: the first one's number, and a place for them, which is the same each time."""
        panels = _BUFFER_BYTES // max(1, ops.PANEL * in_features * self._dtype.itemsize)
        at_a_time = max(1, panels) * ops.PANEL
        wanted = min(at_a_time, out_features) * in_features
        if len(self._buffer) < wanted:
            self._buffer = torch.empty(wanted, dtype=self._dtype)
        for first in range(0, out_features, at_a_time):
            num_rows = min(at_a_time, out_features - first)
            yield first, self._buffer[: num_rows * in_features].view(num_rows, in_features)

    def _find(self, name: str, shape: tuple[int, ...]) -> SafetensorsFile:
        """The file that holds the tensor. Raises CheckpointError as `read`."""
        file = self._file_of.get(name)
        if file is None:
            raise CheckpointError(missing_tensor(name, self._folder / "model.safetensors"))
        handle = self._handle(file)
        stored = handle.tensors.get(name)
        if stored is None:
            raise CheckpointError(missing_tensor(name, self._folder / file))
        if stored.shape != shape:
            raise CheckpointError(wrong_shape(name, self._folder / file, stored.shape, shape))
        return handle


class _Part:
    """Where one part of a stack of matrices is read from."""

    def __init__(self, file: SafetensorsFile, part: MatrixPart) -> None:
        self.rows = range(part.shape[0])[part.rows]
        self.num_columns = len(range(part.shape[1])[part.columns])
        self._file = file
        self._name = part.name
        self._columns = None if part.columns == WHOLE else part.columns

    def read_into(self, out: Tensor, rows: range) -> None:
        """Rows of the part, by their numbers in it."""
        self._file.read_into(out, self._name, self.rows[rows.start : rows.stop], self._columns)


def _read_rows(stack: Sequence[_Part], first: int, out: Tensor) -> None:
    """Fills `out` with rows of the stack, from number `first` on."""
    begin, end = first, first + len(out)  # of what is wanted, counted from the part's first row
    done = 0
    for part in stack:
        rows = range(len(part.rows))[max(0, begin) : max(0, end)]
        part.read_into(out[done : done + len(rows)], rows)
        done += len(rows)
        begin, end = begin - len(part.rows), end - len(part.rows)


def _slice(shape: tuple[int, ...], rows: slice, columns: slice) -> tuple[range, tuple[int, ...]]:
    """Which rows of a tensor of that shape are asked for, and the shape of what is."""
    if not shape:
        return range(1), ()
    row_ids = range(shape[0])[rows]
    rest = shape[1:] if len(shape) == 1 or columns == WHOLE else (len(range(shape[1])[columns]), *shape[2:])
    return row_ids, (len(row_ids), *rest)
