"""Reading pixels from segments."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from airside.proto.messages import PixelsRef, TensorRef
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
