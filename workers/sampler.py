"""From logits to one token per row."""

from __future__ import annotations

from torch import Tensor

from airside.workers import ops
from airside.workers.step_batch import SamplingBatch


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """[num_rows] int32 token ids; a row's banned ids have no probability. -1 where no id has any.

    Args:
        logits: [num_rows, vocab] float32; overwritten where ids are banned.
    """
    logits[batch.banned_rows, batch.banned_ids] = float("-inf")
    return ops.sample(logits, batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.seed, batch.position)
