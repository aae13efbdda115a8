"""Packed weights on disk, so that the next start reads them as they are.

One file for each checkpoint, dtype, quantization and rank. It is written once a model is loaded, beside its place and
then renamed, and read into the memory that weights are in anyway: a mapping would spare the copy, but has pages of 4
KiB, with which every step takes an eighth longer (`packed_weight.py`).

    line of JSON: what it is made of, and a table of what is in it     | zeros | weight | zeros | weight | ...
                                                                      each weight at a multiple of _ALIGNMENT

What cannot be read, or not be written, costs time and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from airside.workers import ops
from airside.workers.packed_weight import PackedWeight
from airside.workers.weights.file_bytes import bytes_of, read_bytes

log = logging.getLogger(__name__)

MIN_BYTES = 32 << 20
"""Models with less are packed in the time that a file takes."""

_FORM = 1  # of the file
_ALIGNMENT = 4096
_HEADER_BYTES_MAX = 64 << 20
_PARTIAL = ".partial-"
_PARTIAL_AGE_S = 3600.0  # of one whose writer must have died


@dataclass(frozen=True, slots=True)
class Entry:
    """A weight in the file."""

    format: str
    out_features: int
    in_features: int
    begin: int
    num_bytes: int
    checksum: int


class PackedCache:
    """The file of one rank's weights.

    Args:
        folder: where such files are; made if need be.
        source: the checkpoint, a folder or a file.
        traits: what else the packed bytes depend on.
    """

    def __init__(self, folder: Path, source: Path, traits: Mapping[str, str | int]) -> None:
        self._folder = folder
        self._source = source.resolve()
        words = [str(self._source), *(f"{name}={value}" for name, value in sorted(traits.items()))]
        self.path = folder / f"{self._source.name}-{hashlib.sha256(' '.join(words).encode()).hexdigest()[:16]}.packed"
        self._made_of = {"form": _FORM, "layout": ops.weight_layout(), "files": _files(self._source), **traits}
        self._kept: dict[str, PackedWeight] = {}
        self._is_whole = True  # all that was asked for was there
        self.num_found = 0
        self._fd: int | None = None
        self._entries: dict[str, Entry] = {}
        self._open()

    def find(self, key: str) -> PackedWeight | None:
        """The weight of that name, if it is there and undamaged."""
        entry = self._entries.get(key)
        packed = None if entry is None or self._fd is None else self._read(self._fd, entry)
        if packed is None:
            self._is_whole = False
            return None
        self.num_found += 1
        self._kept[key] = packed
        return packed

    def keep(self, key: str, packed: PackedWeight) -> None:
        """A weight that was not found and has been made: it will be in the next file."""
        self._kept[key] = packed

    def close(self) -> threading.Thread | None:
        """No more is asked for. If anything was missing, a thread writes the file anew; it may be left alone."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        kept, self._kept = self._kept, {}
        if self._is_whole or sum(len(packed.data) for packed in kept.values()) < MIN_BYTES:
            return None
        thread = threading.Thread(target=self._write, args=(kept,), name="packed-cache", daemon=True)
        thread.start()
        return thread

    def _open(self) -> None:
        if not self.path.exists():
            return
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            made_of, table = _read_header(self._fd)
            self._entries = {key: Entry(*values) for key, values in table.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._ignore(f"it cannot be read: {error!r}")
            return
        if made_of != self._made_of:
            self._ignore("it is of another state of the checkpoint, or of another version")

    def _ignore(self, why: str) -> None:
        log.info("packed weights in %s are not used: %s", self.path, why)
        self._entries = {}

    def _read(self, fd: int, entry: Entry) -> PackedWeight | None:
        try:
            packed = ops.empty_packed(entry.format, entry.out_features, entry.in_features)
            if len(packed.data) != entry.num_bytes:
                raise ValueError("a weight has another size")
            read_bytes(fd, packed.data, entry.begin)
            if _checksum(packed.data) != entry.checksum:
                raise ValueError("a weight has another checksum")
        except (OSError, EOFError, ValueError) as error:
            self._ignore(f"it is damaged: {error}")
            return None
        return packed

    def _write(self, kept: Mapping[str, PackedWeight]) -> None:
        began = time.perf_counter()
        partial = self._folder / f"{_PARTIAL}{self.path.name}-{os.getpid()}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _sweep(self._folder)
            _check_room(self._folder, sum(len(packed.data) for packed in kept.values()))
            try:
                with partial.open("wb") as file:
                    for part in _content(self._made_of, self._source, kept):
                        file.write(part)
                partial.rename(self.path)
            finally:
                partial.unlink(missing_ok=True)
        except OSError as error:
            log.info("packed weights are not kept in %s: %s", self.path, error)
        else:
            log.info("packed weights are kept in %s write_s=%.2f", self.path, time.perf_counter() - began)


def _files(source: Path) -> list[list[str | int]]:
    """Names, sizes and times of the files that weights come from. Packed bytes depend on config and weights alone."""
    files = [source]
    if source.is_dir():
        files = [path for path in sorted(source.iterdir()) if path.suffix == ".safetensors" or path.name in _DESCRIBING]
    stats = [(path.name, path.stat()) for path in files if path.is_file()]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


_DESCRIBING = ("config.json", "model.safetensors.index.json")


def _read_header(fd: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the file is made of, and its table. Raises ValueError for none."""
    begin = os.pread(fd, 64, 0)
    length, space, _ = begin.partition(b" ")
    if not space or not length.isdigit() or int(length) > _HEADER_BYTES_MAX:
        raise ValueError("it does not begin as it should")
    header = json.loads(os.pread(fd, int(length), len(length) + 1))
    made_of, table, size = header["made_of"], header["table"], header["size"]
    if os.fstat(fd).st_size != size:
        raise ValueError("it is not whole")
    return made_of, table


def _content(made_of: Mapping[str, Any], source: Path, kept: Mapping[str, PackedWeight]) -> Iterator[Any]:
    """The parts of a file, one behind the other: bytes, or memory that can be written."""
    table: dict[str, Sequence[object]] = {}
    place = 0  # counted from the first weight
    for key, packed in kept.items():
        data = packed.data
        table[key] = [packed.format, packed.out_features, packed.in_features, place, len(data), _checksum(data)]
        place += -(-len(data) // _ALIGNMENT) * _ALIGNMENT
    header = _header({"made_of": made_of, "source": str(source), "table": table}, place)
    yield header
    for packed in kept.values():
        yield bytes_of(packed.data)
        yield bytes(-len(packed.data) % _ALIGNMENT)


def _header(values: dict[str, Any], num_bytes: int) -> bytes:
    """With the weights' places counted from the beginning of the file, and zeros up to the first."""
    room = -(-(len(json.dumps(values)) + 32 * (len(values["table"]) + 4)) // _ALIGNMENT) * _ALIGNMENT
    table = {key: [*entry[:3], entry[3] + room, *entry[4:]] for key, entry in values["table"].items()}
    text = json.dumps({**values, "table": table, "size": room + num_bytes}).encode()
    header = b"%d %s" % (len(text), text)
    assert len(header) <= room
    return header.ljust(room, b"\0")


def _checksum(data: Tensor) -> int:
    """The sum of its 64-bit words: as fast as memory is read. Sizes of packed weights are multiples of 64 bytes."""
    return int(data.numpy().view(np.int64).sum())  # numpy's, since torch's would start threads of its own beside a step


def _check_room(folder: Path, num_bytes: int) -> None:
    """Raises OSError when the disk would be almost full afterwards."""
    stat = os.statvfs(folder)
    if stat.f_bavail * stat.f_frsize < 2 * num_bytes:
        raise OSError(f"the disk has room for less than twice its {num_bytes} bytes")


def _sweep(folder: Path) -> None:
    """Removes what nobody will read again: files of checkpoints that are gone, and of writers that died."""
    for path in folder.glob("*.packed"):
        with contextlib.suppress(OSError, ValueError, KeyError), path.open("rb") as file:
            length, _, rest = file.read(32).partition(b" ")
            source = json.loads(rest + file.read(int(length) - len(rest)))["source"]
            if not Path(source).exists():
                path.unlink()
    for path in folder.glob(f"{_PARTIAL}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _PARTIAL_AGE_S:
                path.unlink()
