"""What the library shares with torch."""

from __future__ import annotations

import torch

from airside.workers import ops


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    x, weight = torch.randn(500, 576), torch.randn(576)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = ops.rms_norm(x, weight, 1e-5)
        torch.set_num_threads(4)
        assert torch.equal(ops.rms_norm(x, weight, 1e-5), alone)
    finally:
        torch.set_num_threads(before)


def test_an_unknown_instruction_set_is_not_chosen(isa: str) -> None:
    library = ops._library("cpu")
    assert not library.set_isa("abacus")
    assert library.isa() == isa


def test_parameters_that_train_are_accepted() -> None:
    weight = torch.nn.Parameter(torch.ones(8))
    assert torch.equal(ops.rms_norm(torch.ones(1, 8), weight, 0.0), torch.ones(1, 8))
