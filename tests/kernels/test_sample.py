"""`sample`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from airside.workers import ops

MASK = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox-4x32-10 in Python's integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & MASK, (a >> 32) ^ c3 ^ k1, a & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    words = philox((position & MASK, position >> 32, 0, 0), (seed & MASK, (seed >> 32) & MASK))
    return float((words[1] << 32 | words[0]) >> 11) * 2.0**-53


def kept_ids(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    probabilities = (logits.double() / temperature).softmax(-1)
    ids = logits.sort(descending=True, stable=True).indices[: top_k or None]
    mass = probabilities[ids] / probabilities[ids].sum()
    ids = ids[(mass.cumsum(0) - mass < top_p) | (torch.arange(len(ids)) == 0)]
    return ids[probabilities[ids] >= min(min_p, 1.0) * probabilities.max()].sort().values


def meaning(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, u: float) -> int:
    ids = kept_ids(logits, temperature, top_k, top_p, min_p)
    cumulative = (logits[ids].double() / temperature).softmax(-1).cumsum(0)
    return int(ids[(cumulative <= u * cumulative[-1]).sum()])


def sample(
    logits: Tensor,
    temperature: float | Sequence[float] = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | Sequence[int] = 0,
    position: Tensor | None = None,
) -> list[int]:
    rows = len(logits)

    def column(value: object, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(value, dtype=dtype).expand(rows).contiguous()

    drawn: list[int] = ops.sample(
        logits,
        column(temperature, torch.float32),
        column(top_k, torch.int32),
        column(top_p, torch.float32),
        column(min_p, torch.float32),
        column(seed, torch.int64),
        torch.arange(rows) if position is None else position,
    ).tolist()
    return drawn


def test_pythons_philox_gives_the_known_answers() -> None:
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox((MASK,) * 4, (MASK,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox(pi, (0xA4093822, 0x299F31D0)) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


FILTERS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.3, 5, 1.0, 0.0),
    (1.0, 40, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (2.0, 0, 0.3, 0.0),
    (1.0, 0, 0.0, 0.0),
    (1.0, 0, 1.0, 0.05),
    (1.0, 20, 0.8, 0.0),
    (1.5, 30, 0.95, 0.02),
    (1.0, 0, 0.99, 0.001),
    (1.0, 0, 1.0, 2.0),
]


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), FILTERS)
@pytest.mark.parametrize("vocab", [1, 13, 300, 5003])
def test_draws_what_the_uniform_number_says(
    vocab: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(25, vocab) * 2
    seeds = [17 + 10**12 * i for i in range(25)]
    expected = [
        meaning(row, temperature, top_k, top_p, min_p, uniform(seed, i))
        for i, (row, seed) in enumerate(zip(logits, seeds, strict=True))
    ]
    assert sample(logits, temperature, top_k, top_p, min_p, seeds) == expected


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), FILTERS)
def test_draws_all_of_the_kept_set_and_nothing_else(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(50)
    drawn = sample(logits.expand(20_000, -1), temperature, top_k, top_p, min_p, seed=3)
    kept = kept_ids(logits, temperature, top_k, top_p, min_p)
    assert set(drawn) <= set(kept.tolist())
    likely = kept[(logits[kept] / temperature).softmax(-1) > 1e-3]
    assert set(drawn) >= set(likely.tolist())


def test_frequencies_are_the_probabilities() -> None:
    logits, rows = torch.randn(10), 50_000
    counts = torch.bincount(torch.tensor(sample(logits.expand(rows, -1), 0.8, seed=5)), minlength=10)
    expected = (logits.double() / 0.8).softmax(-1) * rows
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 33.7  # 9 degrees of freedom, one in ten thousand


def test_frequencies_over_seeds_at_one_position() -> None:
    rows = 50_000
    drawn = sample(torch.zeros(1, 8).expand(rows, -1), seed=range(rows), position=torch.full((rows,), 12))
    chi_square = ((torch.bincount(torch.tensor(drawn), minlength=8) - rows / 8) ** 2 / (rows / 8)).sum()
    assert chi_square < 29.9  # 7 degrees of freedom, one in ten thousand


def test_a_row_is_the_same_alone_shuffled_and_padded() -> None:
    logits, seeds = torch.randn(40, 1000) * 2, list(range(100, 140))
    together = sample(logits, 1.0, 50, 0.9, 0.01, seeds)
    for i in range(40):
        alone = sample(logits[i : i + 1], 1.0, 50, 0.9, 0.01, seeds[i], torch.tensor([i]))
        assert alone == [together[i]]
    order = torch.randperm(40)
    shuffled = sample(logits[order], 1.0, 50, 0.9, 0.01, [seeds[i] for i in order], order)
    assert shuffled == [together[i] for i in order]
    padded = torch.cat([logits, torch.full((40, 77), torch.nan)], dim=1)[:, :1000]
    assert sample(padded, 1.0, 50, 0.9, 0.01, seeds) == together


def test_large_vocabularies_cut_in_the_last_bucket_and_beyond_the_blocks() -> None:
    logits = torch.randn(4, 49_159) * 0.01
    for top_k, top_p in ((2000, 1.0), (0, 0.5), (40_000, 0.7)):
        expected = [meaning(row, 1.0, top_k, top_p, 0.0, uniform(9, i)) for i, row in enumerate(logits)]
        assert sample(logits, 1.0, top_k, top_p, seed=9) == expected
    cold = sample(logits, 1e-4, 2000, 0.9999, seed=9)
    assert cold == [meaning(row, 1e-4, 2000, 0.9999, 0.0, uniform(9, i)) for i, row in enumerate(logits)]


@pytest.mark.parametrize("vocab", [1, 5, 64, 1000])
def test_temperature_zero_takes_the_first_largest(vocab: int) -> None:
    logits = torch.randint(0, 5, (30, vocab)).float()
    first = [row.index(max(row)) for row in logits.tolist()]
    assert sample(logits, temperature=0.0, top_k=3, top_p=0.1) == first
    assert sample(logits, temperature=0.0, seed=8) == first


def test_equal_logits_are_kept_by_lowest_id() -> None:
    equal = torch.zeros(1, 100).expand(3000, -1)
    assert set(sample(equal, top_k=3)) == {0, 1, 2}
    assert set(sample(equal, top_p=0.04)) == {0, 1, 2, 3}
    assert set(sample(equal, top_k=10, top_p=0.15)) == {0, 1}


def test_banned_tokens_are_never_drawn() -> None:
    logits = torch.randn(64)
    banned = torch.arange(64) % 3 == 0
    rows = logits.masked_fill(banned, -torch.inf).expand(3000, -1)
    choices: list[dict[str, Any]] = [
        {},
        {"top_k": 60},
        {"top_p": 0.999},
        {"min_p": 1e-9},
        {"temperature": 100.0},
        {"temperature": 0.0},
    ]
    for filters in choices:
        assert not banned[sample(rows, **filters)].any()


def test_nan_has_no_probability() -> None:
    logits = torch.randn(2000, 64)
    logits[:, 5] = torch.nan
    choices: list[dict[str, Any]] = [{}, {"top_k": 63}, {"top_p": 0.99}, {"temperature": 0.0}]
    for filters in choices:
        assert 5 not in sample(logits, **filters)


@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_any_probability_gives_no_token(value: float, temperature: float) -> None:
    logits = torch.full((3, 33), value)
    logits[1, 7] = 0.5
    assert sample(logits, temperature, top_k=4, top_p=0.5) == [-1, 7, -1]


@pytest.mark.parametrize("filters", [{}, {"top_k": 4}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 1e-38}])
def test_extremes_end_in_a_token(filters: dict[str, Any]) -> None:  # Any: floats and counts by name
    logits = torch.zeros(4, 33)
    logits[0, 7] = 3e38
    logits[1, 8] = torch.inf
    logits[2] = -3e38
    logits[2, 9] = 0.0
    logits[3, 10] = 1e4
    assert sample(logits, **filters) == [7, 8, 9, 10]


def test_a_temperature_that_is_no_number_is_greedy() -> None:
    logits = torch.randn(3, 20)
    assert sample(logits, [torch.nan, -1.0, 0.0]) == logits.argmax(-1).tolist()


def test_seeds_are_64_unsigned_bits() -> None:
    logits = torch.zeros(1, 1 << 16)
    drawn = {sample(logits, seed=seed)[0] for seed in (0, 1, 1 << 32, 1 << 62, -1)}
    assert len(drawn) == 5
    assert sample(logits, seed=-1)[0] == int(uniform((1 << 64) - 1, 0) * (1 << 16))


def test_no_rows() -> None:
    assert sample(torch.empty(0, 10)) == []


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="sample: logits must be float32"):
        sample(torch.zeros(1, 8).bfloat16())
    with pytest.raises(ValueError, match="sample: position must be int64"):
        sample(torch.zeros(2, 8), position=torch.arange(3))
    with pytest.raises(ValueError, match="the vocabulary's size"):
        sample(torch.zeros(1, 0))
