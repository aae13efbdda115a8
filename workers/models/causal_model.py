"""What the model runner asks of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from airside.workers.kv_cache import LayerCache
from airside.workers.step_batch import StepBatch


class CausalModel(Protocol):
    """A decoder on this rank; calls happen on all ranks in the same order."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] int64 -> [num_tokens, hidden]."""
        ...

    def encode_image(self, pixels: Mapping[str, Tensor]) -> Tensor:
        """One picture's tensors, as its image processor made them -> [num_image_tokens, hidden]."""
        ...

    def forward(self, hidden: Tensor, batch: StepBatch, cache: list[LayerCache]) -> Tensor:
        """[num_tokens, hidden] -> [num_sampled, hidden]: the final states of the rows that sample.

        `hidden` is overwritten.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor | None:
        """[num_rows, hidden] -> [num_rows, vocab] float32 on rank 0, None on the others."""
        ...
