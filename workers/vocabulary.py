"""The two tables over the vocabulary, token embeddings and the projection to logits, split over the ranks by tokens.

In many models both are one table. It is held once then: as the projection multiplies with it, and the embedding finds
its rows in there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from airside.workers import ops
from airside.workers.linear import PackedLinear
from airside.workers.model_config import ModelConfig
from airside.workers.packed_weight import PackedWeight
from airside.workers.parallel import RankGroup
from airside.workers.weights.weight_source import MatrixPart, WeightSource


def read_vocabulary(
    weights: WeightSource, embedding: str, head: str, config: ModelConfig, group: RankGroup
) -> tuple[VocabParallelEmbedding, VocabParallelHead]:
    """Both tables of a model.

    Args:
        embedding, head: the tensors without their suffix `.weight`; the same where both are one.
    Raises:
        CheckpointError: as `WeightSource.read`.
    """
    vocab, hidden = config.vocab_size, config.hidden_size
    made = VocabParallelHead(weights, head, vocab, hidden, group)
    packed = made.exact_rows if head == embedding else None
    return VocabParallelEmbedding(weights, embedding, vocab, hidden, group, packed), made


class VocabParallelEmbedding:
    """Token embeddings; each rank holds its rows of the table.

    Args:
        packed: those rows where somebody else holds them; None: they are read, or stay in the checkpoint's file.
    """

    def __init__(
        self,
        weights: WeightSource,
        name: str,
        vocab_size: int,
        hidden_size: int,
        group: RankGroup,
        packed: PackedWeight | None = None,
    ) -> None:
        self._group = group
        own = _vocab_rows(vocab_size, group)
        self._first, self._num_rows = own.start, own.stop - own.start
        self._look_up: Callable[[Tensor], Tensor]
        if packed is not None:
            self._look_up = lambda rows: ops.gather_packed_rows(packed, rows)
        else:
            table = weights.table(f"{name}.weight", (vocab_size, hidden_size), own)
            # Where there is no token for this rank, all look up a row that counts for nothing.
            table = table if self._num_rows else table.new_zeros(1, hidden_size)
            self._look_up = lambda rows: table.index_select(0, rows)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] int64 -> [num_tokens, hidden]."""
        if self._group.size == 1:
            return self._look_up(token_ids)
        local = token_ids - self._first
        own = (local >= 0) & (local < self._num_rows)
        local = torch.where(own, local, 0)
        return self._group.sum(self._look_up(local).masked_fill_(~own[:, None], 0))


class VocabParallelHead:
    """The projection to logits; each rank computes those of its rows of the vocabulary."""

    def __init__(self, weights: WeightSource, name: str, vocab_size: int, hidden_size: int, group: RankGroup) -> None:
        self._vocab_size = vocab_size
        self._group = group
        self._num_rows = -(-vocab_size // group.size)
        own = _vocab_rows(vocab_size, group)
        self._linear = weights.linear([MatrixPart(f"{name}.weight", (vocab_size, hidden_size), own)])

    @property
    def exact_rows(self) -> PackedWeight | None:
        """This rank's rows, if they are held in a form that has all their bits, and there are any."""
        packed = self._linear.weight if isinstance(self._linear, PackedLinear) else None
        return packed if packed is not None and packed.is_exact and packed.out_features else None

    def __call__(self, hidden: Tensor) -> Tensor | None:
        """[num_rows, hidden] -> [num_rows, vocab_size] float32 on rank 0, None on the others."""
        own = self._linear(hidden)
        # Few vocabularies can be divided evenly; every rank sends as many columns.
        missing = self._num_rows - own.shape[1]
        logits = self._group.gather_columns(functional.pad(own, (0, missing)) if missing else own)
        return None if logits is None else logits[:, : self._vocab_size].float()


def _vocab_rows(vocab_size: int, group: RankGroup) -> slice:
    """The rows of this rank; the last ranks may have fewer than the others, or none."""
    part = -(-vocab_size // group.size)
    first = min(group.rank * part, vocab_size)
    return slice(first, min(first + part, vocab_size))
