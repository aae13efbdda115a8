"""Engram (DeepSeek-AI 2026, arXiv 2601.07372): what is known of the last few tokens, looked up by their hash.

An n-gram ends at each position, for every length from 2 on. Several hash functions per length each name a row of a
table of their own; the rows side by side are the position's memory. A gate that compares the hidden state with the
memory says how much of it is added.

    tokens     The   sky  over  Paris           the memory at "Paris", with 2 hashes per length, is
    folded       7    31     4     90           [ 2-gram (4, 90): row, row | 3-gram (31, 4, 90): row, row ]

An n-gram that reaches over the start or over a token without a text is absent: its rows are zero. All that is kept of a
sequence is its token ids, so chunks, drafts and recomputing change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from airside.workers import ops
from airside.workers.folded_tokens import DEAD, fold_tokens
from airside.workers.model_config import EngramConfig, ModelConfig
from airside.workers.parallel import RankGroup, RowParallelLinear
from airside.workers.step_batch import StepBatch
from airside.workers.weights.weight_source import WeightSource

_ABSENT = -1


class NgramHashes:
    """The hash functions of one layer, a row of numbers each: `((a * c0) xor (b * c1) ...) mod prime`, newest first.

    The constants are odd and of 64 bits, and so are the products; of the result the lower 63 bits count. The primes are
    the largest that the tables have rows for, another for each.
    """

    def __init__(self, config: EngramConfig, layer_id: int) -> None:
        lengths = range(2, config.max_ngram + 1)
        self._lengths = [length for length in lengths for _ in range(config.num_heads)]
        self.primes = primes_up_to(config.table_size, len(self._lengths))
        count = len(self._lengths) * config.max_ngram
        self._constants = np.array(odd_constants(config.seed, layer_id, count), np.uint64).reshape(
            len(self._lengths), config.max_ngram
        )

    def rows(self, windows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row that each table has for each position; -1 where the n-gram is absent.

        Args:
            windows: [num_tokens, max_ngram] folded ids, newest first.
        Returns: [num_tokens, num_tables].
        """
        rows = np.full((len(windows), len(self._lengths)), _ABSENT, np.int64)
        for table, (length, prime) in enumerate(zip(self._lengths, self.primes, strict=True)):
            ngrams = windows[:, :length]
            products = ngrams.astype(np.uint64) * self._constants[table, :length]
            mixed = np.bitwise_xor.reduce(products, axis=1) & np.uint64(2**63 - 1)
            present = (ngrams != DEAD).all(axis=1)
            rows[present, table] = mixed[present] % np.uint64(prime)
        return rows


def primes_up_to(limit: int, count: int) -> list[int]:
    """The `count` largest primes that are not above `limit`, largest first."""
    found: list[int] = []
    for number in range(limit, 1, -1):
        if len(found) == count:
            break
        if all(number % divisor for divisor in range(2, int(number**0.5) + 1)):
            found.append(number)
    assert len(found) == count, f"there are no {count} primes up to {limit}"
    return found


def odd_constants(seed: int, layer_id: int, count: int) -> list[int]:
    """64-bit odd numbers: the layer's part of the stream of SplitMix64 (Steele et al. 2014)."""
    mask = 2**64 - 1
    constants = []
    for index in range(count):
        z = (seed + (layer_id * count + index + 1) * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        constants.append((z ^ (z >> 31)) | 1)
    return constants


class EngramLayer:
    """The memory of one decoder layer. Each rank holds its part of the tables."""

    def __init__(
        self, weights: WeightSource, prefix: str, config: ModelConfig, layer_id: int, group: RankGroup
    ) -> None:
        assert config.engram is not None
        hidden, dim = config.hidden_size, config.engram.dim
        self._hashes = NgramHashes(config.engram, layer_id)
        primes = self._hashes.primes
        starts = np.concatenate(([0], np.cumsum(primes)))
        self._own = group.shard(len(primes))
        first, last = int(starts[self._own.start]), int(starts[self._own.stop])
        self._starts = starts[self._own] - first
        self._tables = weights.table(f"{prefix}.tables.weight", (int(starts[-1]), dim), slice(first, last))
        # Key and value: one product of the memory.
        self._project = RowParallelLinear(
            weights, f"{prefix}.kv_proj", 2 * hidden, len(primes) * dim, group, bias=False
        )
        self.norm = weights.read(f"{prefix}.hidden_norm.weight", (hidden,))
        self._key_norm = weights.read(f"{prefix}.key_norm.weight", (hidden,))
        self._eps = config.rms_norm_eps

    def __call__(self, query: Tensor, windows: NDArray[np.int64]) -> Tensor:
        """[num_tokens, hidden]: what the memory adds to each hidden state.

        Args:
            query: [num_tokens, hidden], the hidden states after this layer's `norm`.
            windows: [num_tokens, max_ngram] folded ids, newest first.
        """
        own = self._hashes.rows(windows)[:, self._own]
        rows = torch.from_numpy(np.where(own == _ABSENT, 0, own + self._starts)).to(query.device)
        absent = torch.from_numpy(own == _ABSENT).to(query.device)
        memory = functional.embedding(rows, self._tables).masked_fill_(absent[:, :, None], 0)
        key, value = self._project(memory.flatten(1)).chunk(2, dim=1)
        key = ops.rms_norm(key, self._key_norm, self._eps)
        match = sum_columns(query.float() * key.float()) * query.shape[1] ** -0.5
        return sigmoid(match).to(value.dtype) * value


def sigmoid(x: Tensor) -> Tensor:
    """Elementwise, float32. torch's own has two results, one for whole vectors of elements and one for the rest.

    So it is computed from the exponential, and in float64, where a difference would be lost in rounding.
    """
    return (1 / (1 + torch.exp(-x.double()))).float()


def sum_columns(x: Tensor) -> Tensor:
    """[num_rows, 1]: each row's sum, halves added to halves, so that no row's order depends on how many there are."""
    while x.shape[1] > 1:
        half = (x.shape[1] + 1) // 2
        folded = x[:, :half].clone()
        folded[:, : x.shape[1] - half] += x[:, half:]
        x = folded
    return x


@dataclass(frozen=True, slots=True)
class Memory:
    """One layer's part in one step."""

    layer: EngramLayer
    windows: NDArray[np.int64]  # [num_tokens, max_ngram]

    @property
    def norm(self) -> Tensor:
        """[hidden]: of the norm that `recall` takes the hidden states after."""
        return self.layer.norm

    def recall(self, query: Tensor) -> Tensor:
        """[num_tokens, hidden] -> the same shape: what is to be added to the hidden states."""
        return self.layer(query, self.windows)


class Engrams:
    """All memories of a model, by layer, and the folded vocabulary they share.

    Raises:
        CheckpointError: a tensor or the tokenizer is missing.
    """

    def __init__(self, weights: WeightSource, prefix: str, config: ModelConfig, group: RankGroup) -> None:
        assert config.engram is not None
        images = () if config.image_token_id is None else (config.image_token_id,)
        self._folded = fold_tokens(Path(config.engram.tokenizer_file), config.vocab_size, images)
        self._max_ngram = config.engram.max_ngram
        self._layers = {
            layer_id: EngramLayer(weights, f"{prefix}.{layer_id}.engram", config, layer_id, group)
            for layer_id in config.engram.layers
        }

    def memories(self, batch: StepBatch) -> dict[int, Memory]:
        """What each layer with a memory looks up in this step, by layer."""
        windows = self._windows(batch)
        return {layer_id: Memory(layer, windows) for layer_id, layer in self._layers.items()}

    def _windows(self, batch: StepBatch) -> NDArray[np.int64]:
        """[num_tokens, max_ngram]: the folded ids of each token and of those before it, newest first.

        Raises:
            AssertionError: the plan does not say what comes before its rows.
        """
        back = self._max_ngram - 1
        assert batch.tail_ids is not None, "the plan has no tail ids"
        assert batch.tail_ids.shape[1] == back, f"{batch.tail_ids.shape[1]} tail ids per row, and not {back}"
        num_new = batch.rows.num_new
        row_of_token = np.repeat(np.arange(len(num_new)), num_new)
        places = np.arange(len(row_of_token)) + (row_of_token + 1) * back  # each row stands behind its tail
        ids = np.empty(len(places) + len(num_new) * back, np.int64)
        is_tail = np.ones(len(ids), np.bool_)
        is_tail[places] = False
        ids[places] = batch.rows.token_ids
        ids[is_tail] = batch.tail_ids.cpu().numpy().reshape(-1)
        folded: NDArray[np.int64] = np.where(ids < 0, DEAD, self._folded[ids])
        windows: NDArray[np.int64] = folded[places[:, None] - np.arange(self._max_ngram)]
        return windows
