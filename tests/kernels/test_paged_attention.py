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


def scatter(rows: list[Tensor], tables: Tensor, num_blocks: int, block_size: int) -> Tensor:
    cache = torch.full((num_blocks, rows[0].shape[1], block_size, rows[0].shape[2]), torch.nan).to(rows[0].dtype)
    for table, row in zip(tables.long(), rows, strict=True):
        at = torch.arange(len(row))
        cache[table[at // block_size], :, at % block_size] = row
    return cache


Attended = tuple[Tensor, Tensor, Tensor]  # q: [query_len, heads, head_dim], k and v: [context_len, ...]


def page(*sequences: Attended, block_size: int = 16) -> Paged:
    q, k, v = ([seq[i] for seq in sequences] for i in range(3))
    per_seq = max(-(-len(keys) // block_size) for keys in k)
    num_blocks = per_seq * len(k) + 3
    tables = torch.randperm(num_blocks)[: per_seq * len(k)].view(len(k), per_seq).int()
    k_cache, v_cache = (scatter(rows, tables, num_blocks, block_size) for rows in (k, v))
    for row, keys in zip(tables, k, strict=True):
        row[-(-len(keys) // block_size) :] = -1  # past the context: must not be read
    return Paged(torch.cat(q), k_cache, v_cache, tables, [len(x) for x in q], [len(x) for x in k])


def meaning(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
    hidden = torch.ones(q.shape[1], k.shape[1]).triu(k.shape[1] - q.shape[1] + 1).bool()
    scores = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
    out: Tensor = scores.softmax(-1) @ v
    return out.transpose(0, 1)


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
    (100, 1, 8, 16),
]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), SHAPES)
def test_is_causal_attention(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, block_size: int) -> None:
    lens = [(1, 1), (1, 200), (5, 5), (70, 131), (1, 64), (65, 65), (3, 67)]
    sequences = [sequence(n, context, heads, kv_heads, head_dim, dtype) for n, context in lens]
    out = page(*sequences, block_size=block_size).run()
    expected = torch.cat([meaning(*seq) for seq in sequences])
    error = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=error, atol=2e-6)


def test_a_row_is_the_same_alone_chunked_and_batched(dtype: torch.dtype) -> None:
    q, k, v = sequence(140, 140, dtype=dtype)
    whole = page((q, k, v)).run()
    for cuts in ([1] * 140, [7, 64, 1, 68], [139, 1], [33, 100, 7]):
        ends = torch.tensor(cuts).cumsum(0).tolist()
        parts = [page((q[e - n : e], k[:e], v[:e])).run() for n, e in zip(cuts, ends, strict=True)]
        assert torch.equal(torch.cat(parts), whole)
    before, after = [sequence(1, 90, dtype=dtype), sequence(50, 50, dtype=dtype)], sequence(1, 300, dtype=dtype)
    assert torch.equal(page(*before, (q, k, v), after).run()[51:191], whole)


def test_the_block_size_changes_nothing() -> None:
    q, k, v = sequence(40, 150)
    outs = [page((q, k, v), block_size=block_size).run() for block_size in (1, 8, 16, 150, 256)]
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_threads_change_nothing() -> None:
    paged = page(sequence(300, 300))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = paged.run()
        torch.set_num_threads(3)
        assert torch.equal(paged.run(), alone)
    finally:
        torch.set_num_threads(before)


def test_later_tokens_never_reach_earlier_rows() -> None:
    q, k, v = sequence(100, 100)
    clean = page((q, k, v)).run()
    k[60:], v[60:] = torch.nan, torch.inf
    spoilt = page((q, k, v)).run()
    assert torch.equal(spoilt[:60], clean[:60])
    assert spoilt[60:].isnan().all()


def test_large_scores_do_not_overflow() -> None:
    q, k, v = sequence(3, 80)
    out = page((q * 1e4, k * 1e4, v)).run()
    torch.testing.assert_close(out.double(), meaning(q * 1e4, k * 1e4, v), rtol=1e-5, atol=1e-5)


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
