"""`paged_attention` where a row does not see all positions up to its own: windows, and pictures seen whole."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from airside.workers import ops
from tests.kernels.test_paged_attention import SHAPES, Paged, causal, expect_near, page, sequence

LENS = [(1, 1), (1, 200), (5, 5), (70, 131), (1, 64), (65, 65), (3, 67), (140, 300)]

WINDOWED = [(*shape, window) for shape in SHAPES[:-1] for window in (1, 7, 64, 65, 100)] + [(*SHAPES[-1], 65)]
"""Shapes with windows; many heads, which take long, with one."""


def run(paged: Paged, window: int = 0, attend_to: list[int] | None = None) -> Tensor:
    starts = torch.tensor([0, *paged.query_lens]).cumsum(0).int()
    lens = torch.tensor(paged.context_lens, dtype=torch.int32)
    ends = None if attend_to is None else torch.tensor(attend_to, dtype=torch.int32)
    args = paged.q, paged.k_cache, paged.v_cache, paged.block_tables, starts, lens, paged.q.shape[-1] ** -0.5
    return ops.paged_attention(*args, window=window, attend_to=ends)


def with_pictures(query_len: int, context_len: int, every: int) -> list[int]:
    """Runs of half of `every` tokens see to their end, which the last of them may not have in this chunk."""
    first = context_len - query_len
    ends = causal(query_len, context_len)
    for i in range(query_len):
        begin, inside = divmod(first + i, every)
        if inside < every // 2:
            ends[i] = min(begin * every + every // 2, context_len)
    return ends


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size", "window"), WINDOWED)
def test_a_window(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, block_size: int, window: int) -> None:
    sequences = [sequence(n, context, heads, kv_heads, head_dim, dtype) for n, context in LENS]
    out = run(page(*sequences, block_size=block_size), window)
    expect_near(out, sequences, [causal(*lens) for lens in LENS], window)


@pytest.mark.parametrize("window", [0, 3, 70])
@pytest.mark.parametrize("every", [4, 20, 150])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), SHAPES[:4])
def test_pictures_that_are_seen_whole(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, block_size: int, every: int, window: int
) -> None:
    sequences = [sequence(n, context, heads, kv_heads, head_dim, dtype) for n, context in LENS]
    ends = [with_pictures(*lens, every) for lens in LENS]
    out = run(page(*sequences, block_size=block_size), window, [end for own in ends for end in own])
    expect_near(out, sequences, ends, window)


def test_all_that_is_wide_enough_is_the_same_to_the_bit(dtype: torch.dtype) -> None:
    paged = page(*[sequence(n, context, dtype=dtype) for n, context in LENS])
    plain = run(paged)
    assert torch.equal(run(paged, window=300), plain)
    assert torch.equal(run(paged, attend_to=[end for lens in LENS for end in causal(*lens)]), plain)


@pytest.mark.parametrize("window", [0, 5, 64, 90])
def test_a_row_is_the_same_alone_chunked_and_batched(dtype: torch.dtype, window: int) -> None:
    q, k, v = sequence(140, 140, dtype=dtype)
    ends = with_pictures(140, 140, 40)
    whole = run(page((q, k, v)), window, ends)
    for cuts in ([20, 20, 100], [60, 1, 79], [33, 107]):  # none of them inside a picture
        at = torch.tensor([0, *cuts]).cumsum(0).tolist()
        spans = list(itertools.pairwise(at))
        parts = [run(page((q[a:b], k[:b], v[:b])), window, ends[a:b]) for a, b in spans]
        assert torch.equal(torch.cat(parts), whole)
    late = run(page((q[45:], k, v)), window, ends[45:])  # a part of a picture, all of which is in the cache
    assert torch.equal(late, whole[45:])
    before = sequence(50, 50, dtype=dtype)
    beside = run(page(before, (q, k, v)), window, [*causal(50, 50), *ends])
    assert torch.equal(beside[50:], whole)


@pytest.mark.parametrize("at", [30, 31])
def test_what_is_out_of_sight_never_reaches_a_row(dtype: torch.dtype, at: int) -> None:
    q, k, v = sequence(100, 100, dtype=dtype)
    k[:at], v[:at] = torch.nan, torch.inf
    out = run(page((q, k, v)), window=10)
    assert out[: at + 9].isnan().any(-1).any(-1).all()
    assert out[at + 9 :].isfinite().all()
    q, k, v = sequence(40, 40, dtype=dtype)
    k[at:], v[at:] = torch.nan, torch.inf
    out = run(page((q, k, v)), attend_to=[at] * at + [40] * (40 - at))
    assert out[:at].isfinite().all()
    assert out[at:].isnan().any(-1).any(-1).all()


@pytest.mark.parametrize("ends", [[36, 38, 39, 40], [37, 38, 39, 41]])
def test_sight_ends_outside_of_the_context_are_refused(ends: list[int]) -> None:
    with pytest.raises(ValueError, match="an entry of attend_to must be at least"):
        run(page(sequence(4, 40)), attend_to=ends)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="paged_attention: window must be at least 0"):
        run(page(sequence(4, 40)), window=-1)
    with pytest.raises(ValueError, match=r"paged_attention: attend_to must be int32 \[4\]"):
        run(page(sequence(4, 40)), attend_to=[40])
