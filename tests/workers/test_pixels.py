"""Reading pixels from segments, and keeping embeddings."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from airside.proto.messages import ImageRow, PixelsRef, TensorRef
from airside.workers.image_embeddings import ImageEmbeddings
from airside.workers.pixels import PixelArena, PixelsUnreadable
from tests.workers.pictures import write_segment

CPU = torch.device("cpu")
TENSORS = {"pixel_values": np.arange(24, dtype=np.float32).reshape(2, 3, 4), "mask": np.ones((2, 2), np.int64)}


def test_tensors_come_back_as_they_were_written(tmp_path: Path) -> None:
    ref = write_segment(tmp_path, "segment", TENSORS)
    read = PixelArena(tmp_path).read(ref, CPU)
    assert {name: tensor.tolist() for name, tensor in read.items()} == {k: v.tolist() for k, v in TENSORS.items()}
    assert read["mask"].dtype is torch.int64


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


def row(seq_id: int, start: int, count: int) -> ImageRow:
    return ImageRow(seq_id, 0, start, count, PixelsRef("", seq_id, 0, []))


def test_embeddings_are_kept_up_to_a_bound_and_the_oldest_go_first() -> None:
    encoded = list[int]()

    def encode(pixels: PixelsRef) -> torch.Tensor:
        encoded.append(pixels.slab)
        return torch.full((4, 2), float(pixels.slab))

    embeddings = ImageEmbeddings(encode, bytes_max=2 * 4 * 2 * 4)
    assert embeddings.rows([row(1, 0, 2), row(2, 3, 1)]).tolist() == [[1, 1], [1, 1], [2, 2]]
    embeddings.rows([row(1, 2, 2), row(3, 0, 4), row(1, 0, 1)])
    assert encoded == [1, 2, 3], "picture 1 was used last and must have stayed"
    embeddings.rows([row(2, 0, 1)])
    assert encoded == [1, 2, 3, 2]


def test_a_picture_larger_than_the_bound_is_still_usable() -> None:
    embeddings = ImageEmbeddings(lambda _: torch.zeros((4, 2)), bytes_max=1)
    assert embeddings.rows([row(1, 0, 4)]).shape == (4, 2)
    with pytest.raises(ValueError, match=r"\[2, 5\) of image 0 .* the picture makes 4"):
        embeddings.rows([row(1, 2, 3)])
