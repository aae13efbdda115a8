"""From logits to one token per sampled position, and their records. Rank 0 alone does this."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from airside.proto.messages import StepPlan
from airside.workers import ops
from airside.workers.grammars import Grammars, Wanted, apply_masks
from airside.workers.logprobs import LogQ, SampledRecords
from airside.workers.sampling_batch import (
    SampledRow,
    SamplingBatch,
    build_sampling_batch,
    list_sampled_rows,
    tokens_that_count,
)
from airside.workers.sequence_states import SequenceStates
from airside.workers.step_batch import Rows, column

_NO_TOKEN = -1  # in place of a token: none had a probability
_REFUSED = -2  # the grammar allowed none of those that had


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step has sampled; the columns of `StepResult`."""

    tokens: NDArray[np.int32]  # [num_positions]
    logprobs: bytes


NOTHING_SAMPLED = Sampled(np.empty(0, np.int32), b"")


class Sampler:
    """Samples the steps in order. Keeps of opened sequences what their next logits depend on.

    Args:
        grammars: of the structured sequences; None: there can be none.
        log_q: of the draft head, for the records, if there is one.
        picture_ids: are never sampled: tokens that only pictures may bring would be taken for some.
    """

    def __init__(
        self, grammars: Grammars | None, log_q: LogQ | None, device: torch.device, picture_ids: tuple[int, ...] = ()
    ) -> None:
        self._grammars = grammars
        self._picture_ids = torch.tensor(picture_ids, dtype=torch.int64, device=device)
        self._log_q = log_q
        self._device = device
        self._states = SequenceStates(device)

    def begin(self, plan: StepPlan) -> None:
        """Opens and closes the sequences that the plan names. Due for each plan, whether it samples or not."""
        if plan.closed:
            for seq_id in column(plan.closed, np.uint64).tolist():
                self._states.close(seq_id)
        for opened in plan.opened:
            self._states.open(opened)

    def sample(self, plan: StepPlan, rows: Rows, logits: Tensor) -> Sampled:
        """Tokens and records of all sampled positions.

        What happens to logits, in order: records are made of them; then penalties, biases and allowed ids
        (`SequenceStates.adjust`), grammar, bans, `ops.sample`. Picture tokens are out after the records. A forced
        token takes the place of the one sampled.

        Args:
            logits: [num_positions, vocab] float32; overwritten.
        """
        batch = build_sampling_batch(plan, rows, self._device)
        if not (len(self._states) or plan.structured or plan.logprobs):
            self._exclude_images(logits)
            return Sampled(_choose(logits, batch, plan.forced), b"")

        sampled_rows = list_sampled_rows(plan, rows)
        records = SampledRecords(plan, sampled_rows, logits) if plan.logprobs else None
        self._exclude_images(logits)
        self._states.adjust(logits, sampled_rows)
        structured = self._structured(plan, sampled_rows)
        places = self._restrict(logits, structured)
        tokens = _choose(logits, batch, plan.forced, places)
        self._take(tokens.tolist(), sampled_rows, structured)
        return Sampled(tokens, b"" if records is None else records.of(tokens, self._log_q))

    def _exclude_images(self, logits: Tensor) -> None:
        if len(self._picture_ids):
            logits.index_fill_(1, self._picture_ids, float("-inf"))

    def _structured(self, plan: StepPlan, sampled_rows: list[SampledRow]) -> list[SampledRow]:
        if not plan.structured:
            return []
        is_structured = column(plan.structured, np.uint8)
        return [row for row in sampled_rows if is_structured[row.index]]

    def _restrict(self, logits: Tensor, structured: list[SampledRow]) -> NDArray[np.int64]:
        """Lets the grammars refuse tokens. Returns the flat positions that have a grammar."""
        if not structured:
            return np.empty(0, np.int64)
        assert self._grammars is not None, "a structured sequence came to a worker without grammars"
        masks = self._grammars.masks([Wanted(row.seq_id, row.position, row.drafts) for row in structured])
        places = np.concatenate([np.arange(row.begin, row.end) for row in structured])
        apply_masks(logits, torch.from_numpy(places).to(logits.device), masks)
        return places

    def _take(self, tokens: list[int], sampled_rows: list[SampledRow], structured: list[SampledRow]) -> None:
        self._states.take(sampled_rows, tokens)
        for row in structured:
            assert self._grammars is not None
            counting = tokens_that_count(tokens[row.begin : row.end], row.drafts)
            self._grammars.advance(row.seq_id, row.position, counting)


def _choose(
    logits: Tensor, batch: SamplingBatch, forced: bytes, restricted: NDArray[np.int64] | None = None
) -> NDArray[np.int32]:
    """[num_positions]: what is sampled, or forced; at restricted positions it is the grammar that leaves no token."""
    if len(batch.banned_ids):
        logits[batch.banned_positions, batch.banned_ids] = float("-inf")
    drawn = ops.sample(logits, batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.seed, batch.position)
    tokens: NDArray[np.int32] = drawn.cpu().numpy()
    if restricted is not None and len(restricted) and tokens[restricted].min() == _NO_TOKEN:
        for place in restricted[tokens[restricted] == _NO_TOKEN].tolist():
            if not bool(logits[place].isnan().any()):
                tokens[place] = _REFUSED
    if forced:
        forced_tokens = column(forced, np.int32)
        assert len(forced_tokens) == len(tokens), "not every position says whether it is forced"
        tokens = np.where(forced_tokens >= 0, forced_tokens, tokens)
    return tokens
