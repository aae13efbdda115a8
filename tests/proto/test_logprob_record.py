"""Log-probability records as they travel."""

from __future__ import annotations

import math
import struct

import pytest

from airside.proto.logprob_record import LogprobRecord, read_records, record_bytes


def packed(record: LogprobRecord) -> bytes:
    k = len(record.top_ids)
    head = record.logprob, record.sum_smaller, record.nextn_logprob, record.confidence
    return struct.pack(f"<4f{k}i{k}f", *head, *record.top_ids, *record.top_logprobs)


@pytest.mark.parametrize("k", [0, 1, 20])
def test_records_are_read_back(k: int) -> None:
    records = [
        LogprobRecord(-1.5 * i, 0.25, -0.5, 0.75, list(range(i, i + k)), [-0.125 * j for j in range(k)])
        for i in range(3)
    ]
    data = b"".join(map(packed, records))
    assert len(data) == 3 * record_bytes(k)
    assert read_records(data, 3) == records
    assert read_records(memoryview(data)[: record_bytes(k)], 1) == records[:1]


def test_absent_values_are_nan() -> None:
    (record,) = read_records(struct.pack("<4f", -1.0, 0.0, math.nan, math.nan), 1)
    assert math.isnan(record.nextn_logprob)
    assert math.isnan(record.confidence)


@pytest.mark.parametrize(("size", "num_records"), [(16, 0), (0, 1), (12, 1), (40, 3), (20, 1), (16, 2)])
def test_what_is_no_whole_number_of_records_is_refused(size: int, num_records: int) -> None:
    with pytest.raises(ValueError, match=r"no \d+ log-probability records"):
        read_records(bytes(size), num_records)
