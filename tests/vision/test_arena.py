"""The shared-memory segment: what a reader sees, what is left when its owner is gone."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from airside.proto.work_marks import Work, read_marks
from airside.vision_workers import warm_memory
from airside.vision_workers.arena import Arena, slab_bytes
from airside.vision_workers.segment import HEADER_BYTES, NoRoomForSegment, sweep

SHM = Path("/dev/shm")
MIB = 1 << 20


@pytest.fixture
def name() -> str:
    return f"airside-vtest-{os.getpid()}-arena"


def test_a_reader_finds_every_tensor(name: str) -> None:
    tensors = {
        "odd": np.arange(7, dtype=np.uint8),
        "pixel_values": np.random.default_rng(0).standard_normal((2, 3, 5, 5)).astype(np.float32)[:, ::-1],
    }
    with Arena(name, MIB) as arena:
        ref = arena.write_tensors(tensors).ref
        assert ref.segment == name
        assert ref.num_bytes == slab_bytes(tensors)
        segment = np.memmap(SHM / name, mode="r")
        for tensor in ref.tensors:
            assert (ref.slab + tensor.offset) % 64 == 0
            start = ref.slab + tensor.offset
            raw = segment[start : start + tensors[tensor.name].nbytes]
            assert np.array_equal(raw.view(tensor.dtype).reshape(tensor.shape), tensors[tensor.name])


def test_the_segment_is_private_exclusive_and_sparse(name: str) -> None:
    with Arena(name, 64 * MIB) as arena:
        status = (SHM / name).stat()
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_size == 64 * MIB
        assert status.st_blocks * 512 < MIB
        with pytest.raises(FileExistsError):
            Arena(name, MIB)
        assert arena.num_slabs == 0
    assert not (SHM / name).exists()


@pytest.fixture
def nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_memory, "KEEP_S", 0.0)


@pytest.mark.usefixtures("nothing_is_kept")
def test_memory_goes_back_with_the_last_slab(name: str) -> None:
    with Arena(name, 16 * MIB) as arena:
        refs = [arena.write_tensors({"x": np.ones(MIB, np.uint8)}).ref for _ in range(3)]
        assert (SHM / name).stat().st_blocks * 512 >= 3 * MIB
        for ref in refs:
            assert arena.holds(ref.slab)
            arena.release(ref.slab)
        arena.give_back()
        assert (SHM / name).stat().st_blocks * 512 < MIB
        assert (SHM / name).stat().st_size == 16 * MIB


def test_memory_that_came_back_is_kept_for_the_next_slab_and_no_longer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Arena(name, 16 * MIB) as arena:
        for turn in range(5):
            now = 0.7 * turn * warm_memory.KEEP_S  # each time the memory of the turn before is still warm
            slab = arena.write_tensors({"x": np.ones(3 * MIB, np.uint8)}).ref.slab
            now += 0.6 * warm_memory.KEEP_S  # and would not be, but for its use in this turn
            arena.release(slab)
            arena.give_back()
            assert 3 * MIB <= (SHM / name).stat().st_blocks * 512 < 4 * MIB
        ref = arena.write_tensors({"x": np.ones(MIB, np.uint8)}).ref
        now += 1.1 * warm_memory.KEEP_S
        arena.give_back()
        assert MIB <= (SHM / name).stat().st_blocks * 512 < 2 * MIB
        assert np.all(np.memmap(SHM / name, mode="r")[ref.slab : ref.slab + MIB] == 1)


def test_memory_that_is_kept_is_no_reason_to_have_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has room for five MiB of this segment."""
    write = os.pwrite

    def limited(descriptor: int, data: memoryview, offset: int) -> int:
        if (SHM / name).stat().st_blocks * 512 + len(data) > 5 * MIB:
            raise OSError(errno.ENOSPC, "full")
        return write(descriptor, data, offset)

    with Arena(name, 16 * MIB) as arena:
        first, second = (arena.write_tensors({"x": np.ones(size * MIB, np.uint8)}).ref.slab for size in (2, 1))
        arena.release(first)
        monkeypatch.setattr(os, "pwrite", limited)
        arena.write_tensors({"x": np.ones(3 * MIB, np.uint8)})  # larger than the gap whose memory is kept
        arena.release(second)


@pytest.mark.usefixtures("nothing_is_kept")
def test_the_memory_of_each_slab_goes_back_while_others_stay(name: str) -> None:
    """Those beside it share pages with it, and keep what they have."""
    with Arena(name, 16 * MIB) as arena:
        refs = [arena.write_tensors({"x": np.full(MIB + 64 * odd, odd, np.uint8)}).ref for odd in range(1, 10)]
        segment = np.memmap(SHM / name, mode="r")
        for number, ref in enumerate(refs[1:8:2], 1):
            arena.release(ref.slab)
            arena.give_back()
            assert (SHM / name).stat().st_blocks * 512 < (9 - number) * MIB + MIB // 2
        for odd, ref in enumerate(refs, 1):
            if arena.holds(ref.slab):
                assert np.all(segment[ref.slab : ref.slab + ref.num_bytes] == odd)
        for ref in refs[0::2]:
            arena.release(ref.slab)
        arena.give_back()
        assert (SHM / name).stat().st_blocks * 512 == HEADER_BYTES


def test_full_shared_memory_costs_no_slab(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    with Arena(name, 4 * MIB) as arena:
        arena.release(arena.write_tensors({"x": np.ones(2 * MIB, np.uint8)}).ref.slab)
        assert (SHM / name).stat().st_blocks * 512 > MIB
        monkeypatch.setattr(os, "pwrite", no_space)
        with pytest.raises(OSError, match="full"):
            arena.write_tensors({"x": np.ones(8, np.uint8)})
        assert arena.num_slabs == 0
        assert (SHM / name).stat().st_blocks * 512 < MIB  # what was kept for the next one, too
        assert arena.can_write({"x": np.ones(arena.bytes_total, np.uint8)})


def test_a_segment_for_which_there_is_no_memory_leaves_no_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwrite", no_space)
    with pytest.raises(NoRoomForSegment, match=r"/dev/shm is full.*vision\.arena"):
        Arena(name, MIB)
    assert not (SHM / name).exists()


def test_sweep_removes_only_what_dead_owners_left(name: str) -> None:
    make_and_die = (
        "import os, sys; from airside.vision_workers.segment import Segment; Segment(sys.argv[1], 8192); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", make_and_die, f"{name}-dead"], check=True, timeout=60)
    foreign = SHM / f"{name}-foreign"
    foreign.write_bytes(bytes(HEADER_BYTES))
    try:
        with Arena(f"{name}-alive", MIB):
            assert sweep(name) == [f"{name}-dead"]
            assert (SHM / f"{name}-alive").exists()
        assert foreign.exists()
    finally:
        foreign.unlink()


def test_a_dead_owner_has_said_what_it_was_looking_into(name: str) -> None:
    die_at_work = (
        "import os, sys; from airside.proto.work_marks import Work\n"
        "from airside.vision_workers.segment import Segment\n"
        "with Segment(sys.argv[1], 8192).marked(Work.PICTURE, (2**40, 3, 1)): os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", die_at_work, name], check=True, timeout=60)
    assert read_marks(name) == {(2**40, 3, 1)}
    assert sweep(name) == [name]
    assert read_marks(name) is None


def test_a_thread_that_outlives_the_segment_writes_nowhere(name: str) -> None:
    with Arena(name, MIB) as arena:
        at_work = arena.marked(Work.PICTURE, (1, 0, 1))
        at_work.__enter__()
    at_work.__exit__(None, None, None)


def test_a_reused_pid_is_not_the_owner(name: str) -> None:
    with Arena(name, MIB):
        with (SHM / name).open("r+b") as file:
            file.seek(16)
            file.write((1).to_bytes(8, "little"))  # another start time than this process's
        assert sweep(name) == [name]
