"""Places are used again exactly when nobody has a tensor there."""

from __future__ import annotations

import pytest
import torch

from airside.workers.workspace import Workspace

KIB = 1024


def test_places_do_not_overlap_and_are_aligned() -> None:
    workspace = Workspace(64 * KIB)
    tensors = [workspace.empty((rows, 3), torch.float32) for rows in (1, 7, 50, 2)]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    assert all((tensor == value).all() for value, tensor in enumerate(tensors))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)


def test_a_place_is_free_when_the_last_view_is_gone() -> None:
    workspace = Workspace(KIB)
    tensor = workspace.empty((16, 16), torch.int32)
    place = tensor.data_ptr()
    view = tensor.view(-1)[5:]
    del tensor
    with pytest.raises(MemoryError, match="1024 bytes"):
        workspace.empty((1,), torch.int32)
    del view
    assert workspace.empty((16, 16), torch.int32).data_ptr() == place
    assert workspace.peak_bytes == KIB


def test_the_lowest_gap_that_is_large_enough_is_taken() -> None:
    workspace = Workspace(KIB)
    first, second, third = (workspace.empty((64,), torch.int32) for _ in range(3))
    low, high = first.data_ptr(), third.data_ptr()
    del first, third
    assert workspace.empty((65,), torch.int32).data_ptr() == high
    assert workspace.empty((64,), torch.int32).data_ptr() == low
    del second


def test_of_nothing_there_is_a_tensor_too() -> None:
    assert Workspace(KIB).empty((0, 5), torch.bfloat16).shape == (0, 5)
