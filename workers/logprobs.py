"""Records of log-probabilities, as `proto/logprob_record.py` lays them out. They are of the model's raw logits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from airside.proto.messages import PromptLogprobRow, StepPlan
from airside.workers import ops
from airside.workers.sampling_batch import SampledRow
from airside.workers.step_batch import column

LogQ = Callable[[int, int], Tensor | None]
"""A draft head's `log_q`."""

_LOGITS_AT_ONCE = 8 * 1024**2
"""A prompt's logits are made and scored this many at a time: all of a chunk's would be gigabytes."""

_HEAD = 4  # float32 values before the alternatives
_SUM_SMALLER, _NEXTN, _CONFIDENCE = 1, 2, 3


class SampledRecords:
    """The records of a step's sampled tokens; made in two halves, since sampling overwrites the logits between them.

    Args:
        logits: [num_positions, vocab] float32, raw.
    """

    def __init__(self, plan: StepPlan, rows: list[SampledRow], logits: Tensor) -> None:
        ks = column(plan.logprobs, np.int32).tolist()
        self._rows = [(row, ks[row.index]) for row in rows if ks[row.index] >= 0]
        places = [place for row, _ in self._rows for place in range(row.begin, row.end)]
        self._places = np.array(places, np.int64)
        self._raw = logits[torch.from_numpy(self._places).to(logits.device)]

    def of(self, tokens: NDArray[np.int32], log_q: LogQ | None) -> bytes:
        """The records of all positions that want them, in the plan's order.

        Args:
            tokens: [num_positions]: what was sampled. A record of no token (negative) says nothing.
            log_q: of the draft head, if there is one.
        """
        if not self._rows:
            return b""
        targets = np.maximum(tokens[self._places], 0)
        table = score(self._raw, targets, max(k for _, k in self._rows))
        begin = 0
        parts = []
        for row, k in self._rows:
            own = table[begin : begin + row.end - row.begin]
            if log_q is not None:
                _fill_in_drafter(own, row, targets[begin : begin + len(own)], log_q)
            parts.append(_cut(own, k).tobytes())
            begin += len(own)
        return b"".join(parts)


def prompt_records(
    rows: list[PromptLogprobRow], final: Tensor, logits_of: Callable[[Tensor], Tensor | None], vocab_size: int
) -> bytes:
    """The records of prompt tokens on rank 0, b"" on the others, which take part in making the logits.

    Args:
        final: [num_scored, hidden]: the final states of the tokens before those of `targets`, row after row.
        logits_of: the model's head.
    """
    at_once = max(1, _LOGITS_AT_ONCE // vocab_size)
    parts = []
    row_begin = 0
    for row in rows:
        targets = column(row.targets, np.int32)
        own = final[row_begin : row_begin + len(targets)]
        for begin in range(0, len(targets), at_once):
            logits = logits_of(own[begin : begin + at_once])
            if logits is not None:
                parts.append(score(logits, targets[begin : begin + at_once], row.k).tobytes())
        row_begin += len(targets)
    return b"".join(parts)


def score(logits: Tensor, targets: NDArray[np.int32], k: int) -> NDArray[np.float32]:
    """Records of one token per row, without what a draft head knows: [num_rows, 4 + 2 * k], bits of ids as float32.

    Args:
        logits: [num_rows, vocab] float32.
        targets: [num_rows]: the token of each record.
    """
    ids = torch.from_numpy(targets.astype(np.int32)).to(logits.device)
    logprobs, sums_smaller, top_ids, top_logprobs = ops.token_logprobs(logits, ids, k)
    table = np.full((len(targets), _HEAD + 2 * k), np.nan, np.float32)
    table[:, 0] = logprobs.cpu().numpy()
    table[:, _SUM_SMALLER] = sums_smaller.cpu().numpy()
    table[:, _HEAD : _HEAD + k] = top_ids.cpu().numpy().view(np.float32)
    table[:, _HEAD + k :] = top_logprobs.cpu().numpy()
    return table


def _fill_in_drafter(table: NDArray[np.float32], row: SampledRow, targets: NDArray[np.int32], log_q: LogQ) -> None:
    for index, target in enumerate(targets.tolist()):
        proposed_from = log_q(row.seq_id, row.position + index)
        if proposed_from is None:
            continue
        table[index, _NEXTN] = float(proposed_from[target])
        if index < len(row.drafts):
            table[index, _CONFIDENCE] = float(proposed_from[row.drafts[index]].exp())


def _cut(table: NDArray[np.float32], k: int) -> NDArray[np.float32]:
    """The first k of each record's alternatives; they are the largest."""
    k_max = (table.shape[1] - _HEAD) // 2
    if k == k_max:
        return table
    return np.concatenate((table[:, : _HEAD + k], table[:, _HEAD + k_max : _HEAD + k_max + k]), axis=1)
