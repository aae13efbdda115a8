"""`token_logprobs`."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from airside.workers import ops

INF = math.inf


def check_row(logits: Tensor, target: int, k: int, row: tuple[Tensor, ...]) -> None:
    """Against float64 numpy."""
    logprob, smaller, top_ids, top_logprobs = row
    exact = logits.double().numpy()
    log_p = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    assert float(logprob) == pytest.approx(log_p[target], abs=1e-5)
    assert float(smaller) == pytest.approx(np.exp(log_p[exact < exact[target]]).sum(), abs=1e-5)
    order = np.argsort(-exact, kind="stable")[:k]
    assert top_ids.tolist() == order.tolist()
    np.testing.assert_allclose(top_logprobs.numpy(), log_p[order], atol=1e-5)


@pytest.mark.parametrize("k", [0, 1, 5, 20])
@pytest.mark.parametrize("vocab", [21, 64, 1000, 49280])
@pytest.mark.parametrize("spread", [0.1, 5.0])
def test_it_is_the_softmax(k: int, vocab: int, spread: float) -> None:
    logits = torch.randn(5, vocab) * spread
    targets = torch.randint(vocab, (5,), dtype=torch.int32)
    targets[0] = logits[0].argmax()
    targets[1] = logits[1].argmin()
    rows = zip(*ops.token_logprobs(logits, targets, k), strict=True)
    for row_logits, target, row in zip(logits, targets.tolist(), rows, strict=True):
        check_row(row_logits, target, k, row)


def test_equals_are_in_order_of_their_ids_and_not_smaller() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0, 0.0]])
    logprob, smaller, top_ids, _ = ops.token_logprobs(logits, torch.tensor([2], dtype=torch.int32), 4)
    assert top_ids.tolist() == [[1, 3, 0, 2]]
    p = logits[0].double().softmax(0)
    assert float(logprob[0]) == pytest.approx(float(p[2].log()), abs=1e-6)
    assert float(smaller[0]) == pytest.approx(float(p[5]), abs=1e-6)


def test_a_row_does_not_depend_on_those_beside_it() -> None:
    logits = torch.randn(9, 5000) * 3
    targets = torch.randint(5000, (9,), dtype=torch.int32)
    together = ops.token_logprobs(logits, targets, 7)
    for row in range(9):
        alone = ops.token_logprobs(logits[row : row + 1], targets[row : row + 1], 7)
        assert all(torch.equal(part[row : row + 1], own) for part, own in zip(together, alone, strict=True))


def test_rows_may_be_strided() -> None:
    wide = torch.randn(4, 300)
    targets = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    strided = ops.token_logprobs(wide[:, :200], targets, 3)
    dense = ops.token_logprobs(wide[:, :200].contiguous(), targets, 3)
    assert all(torch.equal(a, b) for a, b in zip(strided, dense, strict=True))


@pytest.mark.parametrize(
    ("logits", "target", "logprob", "smaller", "top_ids", "top_logprobs"),
    [
        ([0.0, -INF, 0.0], 1, -INF, 0.0, [0, 2, -1], [-math.log(2), -math.log(2), -INF]),
        ([0.0, INF, INF], 2, -math.log(2), 0.0, [1, 2, 0], [-math.log(2), -math.log(2), -INF]),
        ([0.0, math.nan, 0.0], 0, -math.log(2), 0.0, [0, 2, -1], [-math.log(2), -math.log(2), -INF]),
        ([-INF, math.nan, -INF], 1, -INF, 0.0, [-1, -1, -1], [-INF, -INF, -INF]),
        ([1000.0, 0.0, -1000.0], 1, -1000.0, 0.0, [0, 1, 2], [0.0, -1000.0, -2000.0]),
    ],
)
def test_what_has_no_probability(
    logits: list[float],
    target: int,
    logprob: float,
    smaller: float,
    top_ids: list[int],
    top_logprobs: list[float],
) -> None:
    made = ops.token_logprobs(torch.tensor([logits]), torch.tensor([target], dtype=torch.int32), 3)
    assert float(made[0][0]) == pytest.approx(logprob)
    assert float(made[1][0]) == smaller
    assert made[2].tolist() == [top_ids]
    assert made[3][0].tolist() == pytest.approx(top_logprobs)


def test_no_rows_are_no_work() -> None:
    made = ops.token_logprobs(torch.empty(0, 10), torch.empty(0, dtype=torch.int32), 3)
    assert [tuple(part.shape) for part in made] == [(0,), (0,), (0, 3), (0, 3)]


@pytest.mark.parametrize("target", [-1, 10])
def test_a_target_outside_the_vocabulary_is_refused(target: int) -> None:
    with pytest.raises(ValueError, match="a target"):
        ops.token_logprobs(torch.zeros(1, 10), torch.tensor([target], dtype=torch.int32), 0)
