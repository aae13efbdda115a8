"""What a draft head adds to records, and records of several sizes in one step."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from airside.proto.logprob_record import read_records, record_bytes
from airside.workers.logprobs import SampledRecords
from airside.workers.sampling_batch import list_sampled_rows
from airside.workers.step_batch import read_rows
from tests.workers.step_plans import Track, plan_step

VOCAB = 30


def test_records_tell_what_the_draft_head_thought() -> None:
    q = torch.randn(2, VOCAB).log_softmax(1)

    def log_q(seq_id: int, position: int) -> Tensor | None:
        """Sequence 7 was proposed two tokens after output position 1."""
        return q[position - 1] if seq_id == 7 and position in (1, 2) else None

    tracks = [
        Track(6, [1, 2], [0, 1], logprobs=1),
        Track(7, [1, 2, 3], [2, 3], made=[3], drafts=[11, 12], logprobs=3),
        Track(8, [1, 2], [4, 5]),
        Track(9, [1, 2], [6, 7], logprobs=0),
    ]
    plan = plan_step(1, tracks, [2, 3, 2, 2])
    logits = torch.randn(6, VOCAB)
    records = SampledRecords(plan, list_sampled_rows(plan, read_rows(plan)), logits)
    logits_before = logits.clone()
    logits.zero_()  # as sampling may do
    tokens = np.array([5, 11, 20, 13, 4, -1], np.int32)
    data = records.of(tokens, log_q)
    sizes = [record_bytes(1), 3 * record_bytes(3), record_bytes(0)]
    assert len(data) == sum(sizes)
    [first] = read_records(data[: sizes[0]], 1)
    row = read_records(data[sizes[0] : sizes[0] + sizes[1]], 3)

    assert math.isnan(first.nextn_logprob)
    assert first.logprob == pytest.approx(float(logits_before[0].log_softmax(0)[5]), abs=1e-5)
    assert first.top_ids == logits_before[0].topk(1).indices.tolist()
    assert [record.top_ids for record in row] == logits_before[1:4].topk(3).indices.tolist()
    # Position 1 was to be draft 11, and was; position 2 was to be draft 12; position 3 is beyond what was proposed.
    assert row[0].nextn_logprob == pytest.approx(float(q[0, 11]))
    assert row[0].confidence == pytest.approx(float(q[0, 11].exp()))
    assert row[1].nextn_logprob == pytest.approx(float(q[1, 20]))
    assert row[1].confidence == pytest.approx(float(q[1, 12].exp()))
    assert math.isnan(row[2].nextn_logprob)
    assert math.isnan(row[2].confidence)
