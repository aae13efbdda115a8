"""How the log-probabilities of one token travel: a fixed head, then `k` alternatives.

    | logprob f32 | sum_smaller f32 | nextn_logprob f32 | confidence f32 | k ids i32 | k logprobs f32 |

All are of the model's own distribution at that position: the softmax of its logits in float32, before temperature,
penalties, bias, bans and grammar. With `p` that distribution over tokens and `t` the token of the record:

- `logprob`: `log p(t)`.
- `sum_smaller`: the sum of `p(u)` over all tokens `u` with `p(u) < p(t)`.
- `nextn_logprob`: `log q(t)`, with `q` the draft head's own distribution for this position; NaN where it made none.
- `confidence`: `q(d)`, with `d` the draft head's draft token for this position; NaN where there was none. Drafts by
  n-gram and golden ones have no probability.
- the alternatives: the k tokens of the largest `p`, largest first, of equals the lower id, and `log p` of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

HEAD_BYTES = 16


def record_bytes(k: int) -> int:
    """Size of a record with k alternatives."""
    return HEAD_BYTES + 8 * k


@dataclass(frozen=True, slots=True)
class LogprobRecord:
    """One token's record. Absent values are NaN."""

    logprob: float
    sum_smaller: float
    nextn_logprob: float
    confidence: float
    top_ids: list[int]
    top_logprobs: list[float]


def read_records(data: bytes | memoryview, num_records: int) -> list[LogprobRecord]:
    """The records in `data`, which are of one size. Raises ValueError when they are not."""
    if num_records == 0 or len(data) % num_records or len(data) // num_records < HEAD_BYTES or len(data) % 8:
        raise ValueError(f"{len(data)} bytes are no {num_records} log-probability records")
    rows = np.frombuffer(data, "<f4").reshape(num_records, -1)
    k = (rows.shape[1] - 4) // 2
    ids = rows[:, 4 : 4 + k].copy().view("<i4")
    tops = zip(ids.tolist(), rows[:, 4 + k :].tolist(), strict=True)
    return [
        LogprobRecord(logprob, sum_smaller, nextn_logprob, confidence, top_ids, top_logprobs)
        for (logprob, sum_smaller, nextn_logprob, confidence), (top_ids, top_logprobs) in zip(
            rows[:, :4].tolist(), tops, strict=True
        )
    ]
