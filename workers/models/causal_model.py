"""What the model runner asks of a model, and of a draft head that runs behind one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from airside.proto.messages import StepPlan
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

    def allocate_states(self, num_slots: int, num_blocks: int, max_draft_tokens: int) -> None:
        """Makes room for what the model keeps per sequence and per KV block beside keys and values, if anything.

        Called with the KV setup; what an earlier call made is lost. `max_draft_tokens` of a row may be rejected: the
        next one starts that much further back than it reached.
        """
        ...

    def forward(self, hidden: Tensor, batch: StepBatch, cache: list[LayerCache]) -> Tensor:
        """[num_tokens, hidden] -> [len(batch.wanted), hidden]: the states after the final norm of the tokens wanted.

        `hidden` is overwritten. `cache` has one entry per layer that has keys and values.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor | None:
        """[num_rows, hidden] -> [num_rows, vocab] float32 on rank 0, None on the others. A row's depend on it alone."""
        ...


@dataclass(frozen=True, slots=True)
class Proposals:
    """What a draft head proposes after a step; the columns of `StepResult` by these names.

    With l the head's logits at a position, `log q(t) = l(t) - log(sum over u of exp(l(u)))`: the distribution of its
    softmax in float32, whatever the request's temperature, penalties and bans. A draft d is the t of the largest l, and
    its confidence `q(d)`.
    """

    num_drafts: NDArray[np.int32]  # [num_sampling]
    draft_tokens: NDArray[np.int32]  # [sum(num_drafts)]
    draft_confidences: NDArray[np.float32]  # [sum(num_drafts)]


class Drafter(Protocol):
    """A draft head on this rank. A wrong proposal costs time and nothing else."""

    def allocate(self, num_blocks: int) -> None:
        """Makes the head's own KV cache, over the block tables of the model's; what an earlier one held is lost."""
        ...

    def propose(self, plan: StepPlan, batch: StepBatch, final: Tensor, sampled: Tensor) -> Proposals | None:
        """Called after every step on all ranks; fills the head's own cache, and proposes what `drafts_wanted` asks for.

        Args:
            final: [num_tokens, hidden]: the model's states after its final norm, of all tokens of the step.
            sampled: [num_positions] int32 on the CPU, the same on all ranks; negative where there was no token.
        Returns: on rank 0, None on the others.
        """
        ...

    def log_q(self, seq_id: int, position: int) -> Tensor | None:
        """[vocab] float32: `log q` (see `Proposals`) from which the head proposed output token `position`, if kept.

        Rank 0. Asked between two calls of `propose`, for what the earlier one proposed.
        """
        ...
