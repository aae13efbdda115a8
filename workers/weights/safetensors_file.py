"""One safetensors file, read and not mapped: what has been read from a mapping counts as memory of this process, beside
the copy that is made of it, as long as the mapping is there.

The format: 8 bytes with the length of a JSON object, that object, and the tensors' values
(https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
import mmap
import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from airside.workers.model_config import CheckpointError
from airside.workers.weights.file_bytes import read_bytes

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_HEADER_BYTES_MAX = 100_000_000  # as the format says
_READ_BYTES = 8 << 20
"""How much is read at a time of what is then copied."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is, and what: row-major."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # in the file


class SafetensorsFile:
    """Raises CheckpointError: the file is missing, damaged or has a dtype that is not read here."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._buffer = torch.empty(0, dtype=torch.uint8)  # one for all, since the heap keeps holes where each was
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._fd)
            self.tensors = self._read_header()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error!r}") from error

    def read_into(self, out: Tensor, name: str, rows: range, columns: slice | None = None) -> None:
        """Fills `out` with these rows of a tensor, or these columns of them.

        Args:
            out: of the shape that this has; its values are converted to its dtype. May be strided, and on any device.
            rows: one behind the other; of a tensor without axes, its one value.
            columns: of a matrix; None: all.
        Raises:
            CheckpointError: the file has become shorter.
        """
        if out.numel() == 0:
            return
        stored = self.tensors[name]
        row_shape = stored.shape[1:]
        begin = stored.begin + rows.start * math.prod(row_shape) * stored.dtype.itemsize
        if columns is not None and range(stored.shape[1])[columns] == range(stored.shape[1]):
            columns = None
        if columns is None and out.dtype is stored.dtype and out.is_contiguous() and out.device.type == "cpu":
            self._fill(out, begin)
        else:
            self._fill_by_parts(out, stored.dtype, row_shape, begin, columns)

    def _fill_by_parts(
        self, out: Tensor, dtype: torch.dtype, row_shape: tuple[int, ...], begin: int, columns: slice | None
    ) -> None:
        """As `read_into`, through a buffer; the rows are of that dtype and shape, and begin there in the file."""
        row_bytes = math.prod(row_shape) * dtype.itemsize
        at_a_time = max(1, _READ_BYTES // max(1, row_bytes))
        size = min(at_a_time, len(out)) * row_bytes
        if len(self._buffer) < size:
            self._buffer = torch.empty(size, dtype=torch.uint8)
        buffer = self._buffer[:size].view(dtype).view(-1, *row_shape)
        for first in range(0, len(out), at_a_time):
            some = buffer[: min(at_a_time, len(out) - first)]
            self._fill(some, begin + first * row_bytes)
            out[first : first + len(some)].copy_(some if columns is None else some[:, columns])

    def mapped(self, name: str, rows: range) -> Tensor | None:
        """These rows of a matrix, for reading only, where they are in the file; None: it cannot be mapped."""
        stored = self.tensors[name]
        begin = stored.begin + rows.start * stored.shape[1] * stored.dtype.itemsize
        size = len(rows) * stored.shape[1] * stored.dtype.itemsize
        start = begin - begin % mmap.ALLOCATIONGRANULARITY
        if size == 0 or (begin - start) % stored.dtype.itemsize:
            return None
        try:
            # Private, so that torch, which knows no tensors that only can be read, finds it writable.
            pages = mmap.mmap(self._fd, begin - start + size, flags=mmap.MAP_PRIVATE, offset=start)
        except OSError:
            return None
        return torch.frombuffer(pages, dtype=torch.uint8)[begin - start :].view(stored.dtype).view(-1, stored.shape[1])

    def _fill(self, out: Tensor, begin: int) -> None:
        try:
            read_bytes(self._fd, out, begin)
        except EOFError as error:
            raise CheckpointError(f"{self._path} cannot be read: it ends in the middle of a tensor") from error

    def _read_header(self) -> dict[str, StoredTensor]:
        size = os.fstat(self._fd).st_size
        length = int.from_bytes(os.pread(self._fd, 8, 0), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _HEADER_BYTES_MAX):
            raise ValueError("its header is cut off")
        header = json.loads(os.pread(self._fd, length, 8))
        header.pop("__metadata__", None)
        return {name: _stored(name, entry, 8 + length, size) for name, entry in header.items()}


def _stored(name: str, entry: dict[str, Any], values: int, size: int) -> StoredTensor:  # Any: JSON
    """Raises ValueError for a tensor that is not all in the file, and what looking into an odd header raises."""
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"tensor {name} has dtype {entry['dtype']}")
    dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if not (0 <= begin <= end <= size - values and end - begin == math.prod(shape) * dtype.itemsize):
        raise ValueError(f"tensor {name} is not where the header says")
    return StoredTensor(dtype, shape, values + begin)
