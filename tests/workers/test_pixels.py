"""Reading pixels from segments and parcels."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from airside.proto.messages import PixelsParcel, PixelsRef, TensorRef
from airside.workers.pixels import PixelArena, PixelsUnreadable
from tests.workers.pictures import write_segment

CPU = torch.device("cpu")
TENSORS = {"pixel_values": np.arange(24, dtype=np.float32).reshape(2, 3, 4), "mask": np.ones((2, 2), np.int64)}


def test_tensors_come_back_as_they_were_written(tmp_path: Path) -> None:
    ref = write_segment(tmp_path, "segment", TENSORS)
    read = PixelArena(tmp_path).read(ref, CPU)
    assert {name: tensor.tolist() for name, tensor in read.items()} == {k: v.tolist() for k, v in TENSORS.items()}
    assert read["mask"].dtype is torch.int64


def test_some_of_the_tensors(tmp_path: Path) -> None:
    read = PixelArena(tmp_path).read(write_segment(tmp_path, "segment", TENSORS), CPU, ("mask", "nothing"))
    assert list(read) == ["mask"]


def test_what_was_read_does_not_change_when_the_slab_is_reused(tmp_path: Path) -> None:
    arena = PixelArena(tmp_path)
    read = arena.read(write_segment(tmp_path, "segment", TENSORS), CPU)
    with (tmp_path / "segment").open("r+b") as file:
        file.write(b"\xff" * 8192)
    assert read["pixel_values"].tolist() == TENSORS["pixel_values"].tolist()


def test_an_unlinked_segment_stays_readable_and_a_new_one_is_mapped(tmp_path: Path) -> None:
    arena = PixelArena(tmp_path)
    old = write_segment(tmp_path, "segment", TENSORS)
    arena.read(old, CPU)
    (tmp_path / "segment").rename(tmp_path / "unlinked")
    assert arena.read(old, CPU)["mask"].tolist() == [[1, 1], [1, 1]]
    new = write_segment(tmp_path, "segment", {"mask": np.zeros((2, 2), np.int64)})
    assert arena.read(new, CPU)["mask"].tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segment": "nobody"}, "nobody cannot be opened"),
        ({"slab": 1 << 40}, "outside segment"),
        ({"tensors": [TensorRef("mask", "int64", [1000, 1000], 0)]}, "mask of shape .* outside its slab"),
        ({"tensors": [TensorRef("mask", "int64", [1 << 32, 1 << 32], 0)]}, "mask of shape .* outside its slab"),
        ({"tensors": [TensorRef("mask", "int64", [-1], 0)]}, "mask of shape .* outside its slab"),
        ({"tensors": [TensorRef("mask", "int64", [1], -8)]}, "mask of shape .* outside its slab"),
    ],
)
def test_references_that_do_not_fit_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    ref: PixelsRef = dataclasses.replace(write_segment(tmp_path, "segment", TENSORS), **change)  # type: ignore[arg-type]
    with pytest.raises(PixelsUnreadable, match=message):
        PixelArena(tmp_path).read(ref, CPU)


def parcel_of(folder: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> tuple[PixelsRef, PixelsParcel, memoryview]:
    """As if the slab had been sent: what the segment held, which is gone."""
    ref = write_segment(folder, "segment", tensors)
    content = (folder / "segment").read_bytes()[ref.slab :]
    (folder / "segment").unlink()
    return ref, PixelsParcel(ref.segment, ref.slab, ref.num_bytes), memoryview(content)


def test_what_was_sent_is_read_without_a_segment(tmp_path: Path) -> None:
    arena = PixelArena(tmp_path)
    ref, parcel, content = parcel_of(tmp_path, TENSORS)
    arena.keep(parcel, [content])
    read = arena.read(ref, CPU)
    assert {name: tensor.tolist() for name, tensor in read.items()} == {k: v.tolist() for k, v in TENSORS.items()}
    assert list(arena.read(ref, CPU, ("mask",))) == ["mask"]


def test_what_was_sent_may_lie_anywhere_in_memory(tmp_path: Path) -> None:
    """A frame of the bus starts where it starts."""
    arena = PixelArena(tmp_path)
    ref, parcel, content = parcel_of(tmp_path, TENSORS)
    arena.keep(parcel, [memoryview(b"\xff" + content)[1:]])
    assert arena.read(ref, CPU)["pixel_values"].tolist() == TENSORS["pixel_values"].tolist()


def test_what_was_sent_is_read_and_not_a_segment_of_that_name(tmp_path: Path) -> None:
    arena = PixelArena(tmp_path)
    ref, parcel, content = parcel_of(tmp_path, TENSORS)
    write_segment(tmp_path, "segment", {name: np.zeros_like(tensor) for name, tensor in TENSORS.items()})
    arena.keep(parcel, [content])
    assert arena.read(ref, CPU)["mask"].tolist() == [[1, 1], [1, 1]]
    elsewhere = dataclasses.replace(ref, slab=0)
    assert arena.read(elsewhere, CPU)["mask"].tolist() == [[0, 0], [0, 0]]


def test_what_is_dropped_is_not_read_again(tmp_path: Path) -> None:
    arena = PixelArena(tmp_path)
    ref, parcel, content = parcel_of(tmp_path, TENSORS)
    arena.keep(parcel, [content])
    arena.drop("segment", ref.slab + 64)  # not here: fine
    arena.drop("another", ref.slab)
    arena.read(ref, CPU)
    arena.drop("segment", ref.slab)
    with pytest.raises(PixelsUnreadable, match="segment cannot be opened"):
        arena.read(ref, CPU)
    other, parcel, content = parcel_of(tmp_path, {"mask": np.zeros((2, 2), np.int64)})
    arena.keep(parcel, [content])
    assert arena.read(other, CPU)["mask"].tolist() == [[0, 0], [0, 0]]


def test_memory_of_what_is_dropped_is_free(tmp_path: Path) -> None:
    arena = PixelArena(tmp_path)
    ref, parcel, content = parcel_of(tmp_path, TENSORS)
    frame = bytearray(content)
    arena.keep(parcel, [memoryview(frame)])
    read = arena.read(ref, CPU)
    arena.drop("segment", ref.slab)
    frame.clear()  # impossible while anyone has a view of it
    assert read["mask"].tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("ends", [[], [-1], [None, None], [None, 0]])
def test_parcels_without_their_bytes_are_refused(tmp_path: Path, ends: list[int | None]) -> None:
    arena = PixelArena(tmp_path)
    ref, parcel, content = parcel_of(tmp_path, TENSORS)
    with pytest.raises(PixelsUnreadable, match=f"has {ref.num_bytes} bytes, but came as frames of"):
        arena.keep(parcel, [content[:end] for end in ends])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_bytes": 1 << 20}, "outside segment"),
        ({"tensors": [TensorRef("mask", "int64", [1000, 1000], 0)]}, "mask of shape .* outside its slab"),
        ({"tensors": [TensorRef("mask", "int64", [1], -8)]}, "mask of shape .* outside its slab"),
    ],
)
def test_references_that_do_not_fit_what_was_sent_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    arena = PixelArena(tmp_path)
    ref, parcel, content = parcel_of(tmp_path, TENSORS)
    arena.keep(parcel, [content])
    with pytest.raises(PixelsUnreadable, match=message):
        arena.read(dataclasses.replace(ref, **change), CPU)
