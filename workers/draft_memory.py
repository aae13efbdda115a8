"""What a draft head keeps of sequences from one step to the next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from airside.workers.step_batch import Rows


class DraftMemory:
    """States of tokens whose successor is still to come, and distributions of tokens to be sampled next.

    Nobody says when a sequence has ended: the oldest entries make room for new ones.

    Args:
        num_seqs_max: sequences of which something is kept at a time.
    """

    def __init__(self, num_seqs_max: int) -> None:
        self._num_seqs_max = num_seqs_max
        self._states: OrderedDict[int, tuple[int, Tensor]] = OrderedDict()  # position in the sequence, [1, hidden]
        self._log_q: OrderedDict[int, dict[int, Tensor]] = OrderedDict()  # by place in the output: [vocab]

    def take_states(self, rows: Rows) -> tuple[NDArray[np.bool_], list[Tensor]]:
        """Of the rows whose token before the first was kept: which they are, [num_seqs], and the states in order."""
        with_kept = np.zeros(len(rows.seq_ids), np.bool_)
        states = []
        if self._states:
            for row, (seq_id, start) in enumerate(zip(rows.seq_ids.tolist(), rows.num_computed.tolist(), strict=True)):
                position, state = self._states.pop(seq_id, (None, None))
                if state is not None and position == start - 1:
                    with_kept[row] = True
                    states.append(state)
        return with_kept, states

    def keep_states(self, rows: Rows, which: NDArray[np.int64], states: Tensor) -> None:
        """Keeps the state of the last token of some rows; states: [len(which), hidden]."""
        lasts = rows.num_computed[which] + rows.num_new[which] - 1
        for index, (seq_id, last) in enumerate(zip(rows.seq_ids[which].tolist(), lasts.tolist(), strict=True)):
            self._states[seq_id] = (last, states[index : index + 1])
        while len(self._states) > self._num_seqs_max:
            self._states.popitem(last=False)

    def log_q(self, seq_id: int, position: int) -> Tensor | None:
        """[vocab]: what was kept for output token `position`."""
        return self._log_q.get(seq_id, {}).get(position)

    def keep_log_q(self, seq_id: int, position: int, log_q: Tensor) -> None:
        """Keeps a distribution, [vocab], for output token `position`."""
        self._log_q.setdefault(seq_id, {})[position] = log_q
        while len(self._log_q) > self._num_seqs_max:
            self._log_q.popitem(last=False)

    def forget_log_q(self, seq_ids: Sequence[int]) -> None:
        """Of sequences that have sampled since: other tokens come next."""
        if self._log_q:
            for seq_id in seq_ids:
                self._log_q.pop(seq_id, None)
