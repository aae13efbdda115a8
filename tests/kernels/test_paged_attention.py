"""`paged_attention`."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from airside.workers import ops


@dataclass
class Paged:
    """Sequences whose keys and values lie in shuffled blocks; what no sequence may read is NaN."""

    q: Tensor  # [num_tokens, num_heads, head_dim]
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    query_lens: list[int]
    context_lens: list[int]

    def run(self) -> Tensor:
        starts = torch.tensor([0, *self.query_lens]).cumsum(0).int()
        lens = torch.tensor(self.context_lens, dtype=torch.int32)
        scale = self.q.shape[-1] ** -0.5
        return ops.paged_attention(self.q, self.k_cache, self.v_cache, self.block_tables, starts, lens, scale)


Attended = tuple[Tensor, Tensor, Tensor]  # q: [query_len, heads, head_dim], k and v: [context_len, ...]


def page(*sequences: Attended, block_size: int = 16) -> Paged:
    q, k, v = ([seq[i] for seq in sequences] for i in range(3))
    per_seq = max(-(-len(keys) // block_size) for keys in k)
    num_blocks = per_seq * len(k) + 3
    tables = torch.randperm(num_blocks)[: per_seq * len(k)].view(len(k), per_seq).int()
    k_cache, v_cache = torch.full((2, num_blocks, k[0].shape[1], block_size, k[0].shape[2]), torch.nan).to(k[0].dtype)
    at = [torch.arange(len(keys)) for keys in k]
    slots = [row[i // block_size] * block_size + i % block_size for row, i in zip(tables.long(), at, strict=True)]
    ops.kv_cache_write(torch.cat(k), torch.cat(v), k_cache, v_cache, torch.cat(slots))
    for row, keys in zip(tables, k, strict=True):
        row[-(-len(keys) // block_size) :] = -1  # past the context: must not be read
    return Paged(torch.cat(q), k_cache, v_cache, tables, [len(x) for x in q], [len(x) for x in k])


def causal(query_len: int, context_len: int) -> list[int]:
    """The end of what each row sees."""
    return list(range(context_len - query_len + 1, context_len + 1))


def expect_near(out: Tensor, sequences: list[Attended], ends: list[list[int]], window: int = 0) -> None:
    """Against float64; row i at position p of a sequence sees `[p + 1 - window, ends[i])`."""
    parts = [_meaning(*each, window) for each in zip(sequences, ends, strict=True)]
    expected, size = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    error = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[out.dtype]
    allowed = error * expected.abs() + 2e-6
    if out.dtype is torch.bfloat16:  # each weight is rounded too
        allowed += error * (size + expected.abs())
    assert ((out.double() - expected).abs() <= allowed).all()


def _meaning(seq: Attended, ends: list[int], window: int) -> tuple[Tensor, Tensor]:
    """The result, and what it would be were all values positive."""
    q, k, v = (x.double().transpose(0, 1) for x in seq)
    k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
    own = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None]
    at = torch.arange(k.shape[1])[None]
    seen = (at < torch.tensor(ends)[:, None]) & (at > own - (window or k.shape[1]))
    scores = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    weights = scores.softmax(-1)
    return (weights @ v).transpose(0, 1), (weights @ v.abs()).transpose(0, 1)


def sequence(
    query_len: int,
    context_len: int,
    heads: int = 9,
    kv_heads: int = 3,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
) -> Attended:
    k, v = torch.randn(2, context_len, kv_heads, head_dim).to(dtype)
    return torch.randn(query_len, heads, head_dim).to(dtype), k, v


SHAPES = [
    (9, 3, 64, 16),
    (4, 4, 16, 8),
    (8, 1, 80, 16),
    (2, 2, 128, 32),
    (4, 2, 256, 16),
    (3, 1, 20, 5),
    (2, 1, 3, 1),
    (5, 1, 7, 3),
    (7, 1, 48, 48),
    (100, 1, 8, 16),
]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), SHAPES)
def test_is_causal_attention(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, block_size: int) -> None:
    lens = [(1, 1), (1, 200), (5, 5), (70, 131), (1, 64), (65, 65), (3, 67), (2, 513), (40, 270)]
    sequences = [sequence(n, context, heads, kv_heads, head_dim, dtype) for n, context in lens]
    out = page(*sequences, block_size=block_size).run()
    expect_near(out, sequences, [causal(*each) for each in lens])


@pytest.mark.parametrize("block_size", [5, 16])
def test_a_row_is_the_same_alone_chunked_and_batched(dtype: torch.dtype, block_size: int) -> None:
    q, k, v = sequence(140, 140, dtype=dtype)
    whole = page((q, k, v)).run()
    for cuts in ([1] * 140, [7, 64, 1, 68], [139, 1], [33, 100, 7]):
        ends = torch.tensor(cuts).cumsum(0).tolist()
        chunks = [(q[e - n : e], k[:e], v[:e]) for n, e in zip(cuts, ends, strict=True)]
        parts = [page(chunk, block_size=block_size).run() for chunk in chunks]
        assert torch.equal(torch.cat(parts), whole)
    before, after = [sequence(1, 90, dtype=dtype), sequence(50, 50, dtype=dtype)], sequence(1, 300, dtype=dtype)
    assert torch.equal(page(*before, (q, k, v), after).run()[51:191], whole)


@pytest.mark.parametrize("head_dim", [64, 20, 7])
def test_the_block_size_changes_nothing(dtype: torch.dtype, head_dim: int) -> None:
    q, k, v = sequence(40, 550, head_dim=head_dim, dtype=dtype)
    outs = [page((q, k, v), block_size=block_size).run() for block_size in (16, 1, 3, 8, 32, 150, 256)]
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize(("query_len", "context_len"), [(300, 300), (1, 1500), (3, 1026)])
def test_threads_change_nothing(dtype: torch.dtype, query_len: int, context_len: int) -> None:
    paged = page(sequence(query_len, context_len, dtype=dtype))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = paged.run()
        torch.set_num_threads(3)
        assert torch.equal(paged.run(), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_a_long_context_is_cut_to_the_same_bits(dtype: torch.dtype, num_tokens: int) -> None:
    long = sequence(num_tokens, 1300, dtype=dtype)  # alone its keys are cut for the threads, among others they are not
    alone = page(long).run()
    crowd = [sequence(1, 20, dtype=dtype) for _ in range(20)]
    assert torch.equal(page(*crowd, long).run()[20:], alone)
    assert torch.equal(page(sequence(90, 90, dtype=dtype), long).run()[90:], alone)
    expect_near(alone, [long], [causal(num_tokens, 1300)])


@pytest.mark.parametrize("head_dim", [64, 20])
@pytest.mark.parametrize("first", [60, 61])
def test_later_tokens_never_reach_earlier_rows(dtype: torch.dtype, first: int, head_dim: int) -> None:
    q, k, v = sequence(100, 100, head_dim=head_dim, dtype=dtype)
    clean = page((q, k, v)).run()
    k[first:], v[first:] = torch.nan, torch.inf
    spoilt = page((q, k, v)).run()
    assert torch.equal(spoilt[:first], clean[:first])
    assert spoilt[first:].isnan().all()


def test_large_scores_do_not_overflow() -> None:
    q, k, v = sequence(3, 80)
    large = q * 1e4, k * 1e4, v
    expect_near(page(large).run(), [large], [causal(3, 80)])


def test_queries_may_be_a_slice_of_a_fused_projection(dtype: torch.dtype) -> None:
    q, k, v = sequence(6, 20, dtype=dtype)
    paged = page((q, k, v))
    expected = paged.run()
    paged.q = torch.cat([q.flatten(1), torch.ones(6, 100, dtype=dtype)], dim=1)[:, : 9 * 64].view(6, 9, 64)
    assert not paged.q.is_contiguous()
    assert torch.equal(paged.run(), expected)


def test_a_sequence_without_queries_is_passed_over() -> None:
    first, idle, last = sequence(2, 10), sequence(0, 30), sequence(1, 20)
    assert torch.equal(page(first, idle, last).run(), page(first, last).run())


def test_nothing_to_do() -> None:
    none = torch.empty(0, dtype=torch.int32)
    cache = torch.empty(1, 1, 4, 8)
    starts = torch.zeros(1, dtype=torch.int32)
    out = ops.paged_attention(torch.empty(0, 2, 8), cache, cache, none.view(0, 1), starts, none, 1.0)
    assert out.shape == (0, 2, 8)


def refuse(paged: Paged, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        paged.run()


def test_what_would_read_outside_the_cache_is_refused() -> None:
    paged = page(sequence(4, 40))
    paged.block_tables[0, 2] = len(paged.k_cache)
    refuse(paged, "a block id must be at least 0 and below")
    paged = page(sequence(4, 40))
    paged.context_lens = [3]
    refuse(paged, "a context length must be at least 4")
    paged.context_lens = [49]
    refuse(paged, "a context length must be .* below 49")
    paged.context_lens, paged.query_lens = [40], [5]
    refuse(paged, "a query start|the last of query_starts")


def test_bad_arguments_are_named() -> None:
    paged = page(sequence(4, 40))
    paged.v_cache = paged.v_cache.bfloat16()
    refuse(paged, "paged_attention: v_cache must be float32")
    paged = page(sequence(4, 40))
    paged.q = paged.q[:, :8].contiguous()
    refuse(paged, "8 query heads cannot share 3 KV heads")
    paged = page(sequence(4, 40))
    paged.block_tables = paged.block_tables.long()
    refuse(paged, "paged_attention: block_tables must be int32")
