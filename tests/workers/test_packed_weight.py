"""The memory that packed weights lie in."""

from __future__ import annotations

import pytest
import torch

from airside.workers.packed_weight import HUGE_PAGE, SLAB_BYTES, WeightMemory


def test_weights_lie_apart_and_aligned() -> None:
    memory = WeightMemory()
    sizes = [1, 64, 65, 3_000_000, SLAB_BYTES, SLAB_BYTES + 1, 100, 0, 7]
    weights = [memory.take(size) for size in sizes]
    for number, weight in enumerate(weights):
        weight.fill_(number)
    for number, (weight, size) in enumerate(zip(weights, sizes, strict=True)):
        assert weight.shape == (size,)
        assert weight.data_ptr() % 64 == 0
        assert (weight == number).all()


@pytest.mark.parametrize("size", [1, SLAB_BYTES, SLAB_BYTES + 1])
def test_a_slab_starts_with_a_huge_page(size: int) -> None:
    assert WeightMemory().take(size).data_ptr() % HUGE_PAGE == 0


def test_small_weights_share_a_slab() -> None:
    memory = WeightMemory()
    first, second = memory.take(100), memory.take(100)
    assert second.data_ptr() == first.data_ptr() + 128


def test_a_weight_outlives_its_memory() -> None:
    weight = WeightMemory().take(1000).fill_(5)
    assert torch.equal(weight, torch.full((1000,), 5, dtype=torch.uint8))
