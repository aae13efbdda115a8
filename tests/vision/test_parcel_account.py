"""A store without memory: what is sent, and how much of it may be out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from airside.proto.work_marks import Work, read_marks
from airside.vision_workers.arena import Arena
from airside.vision_workers.parcel_account import ParcelAccount
from airside.vision_workers.pixel_store import PixelStore, slab_bytes

NAME = f"airside-vtest-{os.getpid()}-account"
TENSORS = {
    "odd": np.arange(7, dtype=np.uint8),
    "pixel_values": np.random.default_rng(0).standard_normal((2, 3, 5, 5)).astype(np.float32)[:, ::-1],
    "number": np.array(3, np.int64),
}


def test_the_frame_is_the_slab() -> None:
    written = ParcelAccount(NAME, 1 << 20).write_tensors(TENSORS)
    ref, (frame,) = written.ref, written.frames
    assert ref.segment == NAME
    assert frame.nbytes == ref.num_bytes == slab_bytes(TENSORS)
    assert [tensor.name for tensor in ref.tensors] == list(TENSORS)
    for tensor in ref.tensors:
        assert tensor.offset % 64 == 0
        expected = TENSORS[tensor.name]
        raw = frame[tensor.offset : tensor.offset + expected.nbytes]
        assert np.array_equal(np.frombuffer(raw, tensor.dtype).reshape(tensor.shape), expected)


def test_the_frame_is_laid_out_as_in_shared_memory() -> None:
    with Arena(NAME, 1 << 20) as arena:
        shared, sent = arena.write_tensors(TENSORS), ParcelAccount(NAME, 1 << 20).write_tensors(TENSORS)
        assert shared.frames == ()
        assert shared.ref.tensors == sent.ref.tensors
        begin = shared.ref.slab
        assert Path("/dev/shm", NAME).read_bytes()[begin : begin + shared.ref.num_bytes] == bytes(sent.frames[0])


def test_it_leaves_no_file_and_no_marks() -> None:
    with ParcelAccount(NAME, 1 << 20) as account, account.marked(Work.PICTURE, (1, 2, 3)):
        account.write_tensors(TENSORS)
        assert not Path("/dev/shm", NAME).exists()
        assert read_marks(NAME) is None


@pytest.fixture(params=["arena", "account"])
def store(request: pytest.FixtureRequest) -> Iterator[PixelStore]:
    """Room for two slabs of 4,096 bytes and a bit."""
    with ExitStack() as stack:
        shares = request.param == "arena"
        yield stack.enter_context(Arena(NAME, 4096 + 8256) if shares else ParcelAccount(NAME, 8256))


def zeros(count: int) -> dict[str, NDArray[Any]]:
    return {"x": np.zeros(count, np.uint8)}


def test_room_is_taken_until_it_is_released(store: PixelStore) -> None:
    assert store.bytes_total == 8256
    first, second = (store.write_tensors(zeros(4096)).ref for _ in range(2))
    assert store.num_slabs == 2
    assert store.can_write(zeros(64))
    assert not store.can_write(zeros(65))
    assert store.holds(first.slab)
    assert not store.holds(first.slab + 64)
    store.release(first.slab)
    assert not store.holds(first.slab)
    assert store.can_write(zeros(4096))
    third = store.write_tensors(zeros(4096)).ref
    assert third.slab == first.slab
    for ref in (second, third):
        store.release(ref.slab)
    assert store.num_slabs == 0
    assert store.can_write(zeros(8256))


def test_a_picture_without_memory_takes_no_room() -> None:
    account = ParcelAccount(NAME, 1 << 62)
    huge = np.broadcast_to(np.uint8(0), (1 << 60,))
    with pytest.raises(MemoryError):
        account.write_tensors({"x": huge})
    assert account.num_slabs == 0
