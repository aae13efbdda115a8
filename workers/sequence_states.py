"""What the sampler keeps of the sequences that the plan has opened: penalties, biases, allowed ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from airside.proto.messages import OpenedRow
from airside.workers.sampling_batch import SampledRow, tokens_that_count
from airside.workers.step_batch import column
from airside.workers.token_history import TokenHistory


@dataclass(slots=True)
class SequenceState:
    """One sequence's rules. `history` is None when nothing looks at it, and once the sequence has ended."""

    history: TokenHistory | None
    penalties: tuple[float, float, float]  # repetition, presence, frequency
    bias_ids: Tensor  # [num_biased] int64
    biases: Tensor  # [num_biased] float32
    allowed_ids: Tensor | None  # [num_allowed] int64; None: all


@dataclass(frozen=True, slots=True)
class _Seen:
    """The ids that a position's penalties touch."""

    place: int
    ids: NDArray[np.int64]
    in_output: NDArray[np.int32]
    penalties: tuple[float, float, float]


class SequenceStates:
    """All opened sequences of this launch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states: dict[int, SequenceState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def open(self, opened: OpenedRow) -> None:
        """From now on this sequence's logits are adjusted."""
        penalties = (opened.repetition_penalty, opened.presence_penalty, opened.frequency_penalty)
        history = None
        if penalties != (1.0, 0.0, 0.0):
            history = TokenHistory(column(opened.token_ids, np.int32).tolist(), opened.num_prompt_tokens)
        allowed = torch.tensor(sorted(set(opened.allowed_token_ids)), dtype=torch.int64, device=self._device)
        self._states[opened.seq_id] = SequenceState(
            history,
            penalties,
            torch.tensor(list(opened.logit_bias), dtype=torch.int64, device=self._device),
            torch.tensor(list(opened.logit_bias.values()), dtype=torch.float32, device=self._device),
            allowed if len(allowed) else None,
        )

    def close(self, seq_id: int) -> None:
        """Forgets a sequence; harmless when it is not known."""
        self._states.pop(seq_id, None)

    def adjust(self, logits: Tensor, rows: list[SampledRow]) -> None:
        """Applies, in place and in this order, penalties, biases and allowed ids to the rows of opened sequences.

        With l a logit and c how often its token is in the output so far, drafts before the position included:
        repetition penalty r, of tokens in prompt or output: `l / r` where l > 0, else `l * r` (Keskar et al. 2019,
        arXiv 1909.05858); then `l - frequency * c - presence * (c > 0)`; then `l + bias`; then -inf if not allowed.

        Args:
            logits: [num_positions, vocab] float32.
        """
        opened = [(row, self._states[row.seq_id]) for row in rows if row.seq_id in self._states]
        seen = [entry for row, state in opened for entry in _seen_at_each(row, state)]
        if seen:
            _penalise(logits, seen)
        for row, state in opened:
            if len(state.bias_ids):
                logits[row.begin : row.end, state.bias_ids] += state.biases
            if state.allowed_ids is not None:
                own = logits[row.begin : row.end]
                allowed = own[:, state.allowed_ids]
                own.fill_(float("-inf"))
                own[:, state.allowed_ids] = allowed

    def take(self, rows: list[SampledRow], sampled: Sequence[int]) -> None:
        """Takes in what the rows of a step have sampled, a token per flat position; negative ones are none."""
        for row in rows:
            state = self._states.get(row.seq_id)
            if state is not None and state.history is not None:
                tokens = tokens_that_count(sampled[row.begin : row.end], row.drafts)
                state.history.extend(token for token in tokens if token >= 0)
                if tokens[-1] < 0:  # it ends here, though a step that was planned before may still compute it
                    state.history = None


def _seen_at_each(row: SampledRow, state: SequenceState) -> list[_Seen]:
    """For each position of the row in turn; leaves the history at the first."""
    history = state.history
    if history is None:
        return []
    history.truncate_output(row.position)
    entries = [_Seen(row.begin, *history.seen(), state.penalties)]
    for index, draft in enumerate(row.drafts):
        history.extend([draft])
        entries.append(_Seen(row.begin + 1 + index, *history.seen(), state.penalties))
    history.truncate_output(row.position)
    return entries


def _penalise(logits: Tensor, seen: list[_Seen]) -> None:
    counts = [len(entry.ids) for entry in seen]
    places = torch.from_numpy(np.repeat(np.array([entry.place for entry in seen]), counts)).to(logits.device)
    ids = torch.from_numpy(np.concatenate([entry.ids for entry in seen])).to(logits.device)
    in_output = torch.from_numpy(np.concatenate([entry.in_output for entry in seen])).to(logits.device)
    penalties = np.array([entry.penalties for entry in seen], np.float32).repeat(counts, axis=0)
    repetition, presence, frequency = torch.from_numpy(penalties).to(logits.device).unbind(1)
    values = logits[places, ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * in_output
    values -= presence * (in_output > 0)
    logits[places, ids] = values
