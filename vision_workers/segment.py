"""A shared-memory segment: a file in /dev/shm that its owner makes, and removes when it ends.

`multiprocessing.shared_memory` is not used: its resource tracker removes a segment as soon as any process that
attached to it exits.

    0         8          16               24               72        HEADER_BYTES
    | magic   | pid u64  | start time u64 | `work_marks.py`  | zeros   | slabs ...
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from airside.proto.work_marks import JobKey, Work, mark

PAGE_BYTES = mmap.PAGESIZE
"""The system's memory comes and goes in these."""

HEADER_BYTES = PAGE_BYTES
"""Of its own, so that the slabs behind it can be given back."""

_FOLDER = Path("/dev/shm")
_HEADER = struct.Struct("<8sQQ")
_MAGIC = b"AIRSIDE1"
_HEADER_WAIT_S = 60  # a file older than this that still has no header will never get one


class NoRoomForSegment(RuntimeError):
    """The machine's shared memory is full; says what needs room there."""


class Segment:
    """Made exclusively, sparse, readable by this user alone.

    Written through the file and not through a mapping: a full /dev/shm is then an OSError (ENOSPC), not a SIGBUS.

    Raises:
        FileExistsError: the name is taken.
        NoRoomForSegment: /dev/shm is full.
    """

    def __init__(self, name: str, num_bytes: int) -> None:
        assert Path(name).name == name, f"{name!r} is no segment name"
        assert num_bytes > HEADER_BYTES, f"{num_bytes} bytes leave no room behind the header"
        self.name = name
        self.num_bytes = num_bytes
        self._path = _FOLDER / name
        self._fd = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(self._fd, _HEADER.pack(_MAGIC, os.getpid(), _start_time(os.getpid())), 0)
            os.ftruncate(self._fd, num_bytes)
            self._mapping = mmap.mmap(self._fd, num_bytes)
        except BaseException as error:
            os.close(self._fd)
            self._path.unlink()
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise NoRoomForSegment(f"{_FOLDER} is full; it must have room for vision.arena") from error
            raise

    def write(self, offset: int, data: memoryview) -> None:
        """Copies a contiguous buffer of bytes to a byte offset. Raises OSError when the system has no memory left."""
        assert HEADER_BYTES <= offset <= self.num_bytes - data.nbytes, f"{offset} is outside the segment"
        while data.nbytes:
            written = os.pwrite(self._fd, data, offset)
            offset, data = offset + written, data[written:]

    @contextlib.contextmanager
    def marked(self, work: Work, key: JobKey) -> Iterator[None]:
        """Meanwhile the header says that this is being looked into. It keeps saying so if the process ends with it."""
        self._mark(work, key)
        yield
        self._mark(work, None)

    def _mark(self, work: Work, key: JobKey | None) -> None:
        place, said = mark(work, key)
        with contextlib.suppress(ValueError):  # closed: the thread that makes pictures may outlive it
            self._mapping[place] = said

    def give_back(self, begin: int, end: int) -> None:
        """Returns the memory of the whole pages between two byte offsets to the system; they read as zeros then."""
        assert HEADER_BYTES <= begin <= end <= self.num_bytes, f"{begin} to {end} is outside the segment"
        first, last = -(-begin // PAGE_BYTES) * PAGE_BYTES, end // PAGE_BYTES * PAGE_BYTES
        if first < last:
            self._mapping.madvise(mmap.MADV_REMOVE, first, last - first)

    def close(self) -> None:
        """Removes the segment; who has it mapped keeps what it sees. A second call does nothing."""
        if self._mapping.closed:
            return
        self._mapping.close()
        os.close(self._fd)
        self._path.unlink(missing_ok=True)


def bytes_there() -> int | None:
    """The size of /dev/shm, which no segment can outgrow; None: it has no limit of its own."""
    status = os.statvfs(_FOLDER)
    return status.f_blocks * status.f_frsize or None


def sweep(prefix: str) -> list[str]:
    """Removes the segments whose names start with `prefix` and whose owner is gone; their names.

    Files of other users, and files that are no segments of ours, are left alone.
    """
    removed = []
    for path in sorted(_FOLDER.glob(f"{prefix}*")):
        try:
            if _is_abandoned(path):
                path.unlink()
                removed.append(path.name)
        except (FileNotFoundError, PermissionError):
            continue  # its owner was faster, or it is not ours to judge
    return removed


def _is_abandoned(path: Path) -> bool:
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
        made = os.fstat(file.fileno()).st_mtime
    if not header:
        return time.time() - made > _HEADER_WAIT_S
    if len(header) < _HEADER.size:
        return False
    magic, pid, start_time = _HEADER.unpack(header)
    return bool(magic == _MAGIC) and _start_time(pid) != start_time


def _start_time(pid: int) -> int:
    """Clock ticks from boot to the start of the process, which tells a pid from its reuse; 0 when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = stat.rpartition(")")[2].split()  # behind the name, which may hold spaces: state is field 3 of proc(5)
    return 0 if fields[0] in ("Z", "X") else int(fields[22 - 3])
