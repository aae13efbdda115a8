"""`SamplingParams` as public messages: what was given and nothing else, or an error with the field's name."""

from __future__ import annotations

from typing import Any

import pytest

from airside import SamplingParams
from airside.controller.gateway.errors import RequestError
from airside.proto import airside_pb2 as pb


def test_only_what_was_given_is_set() -> None:
    assert SamplingParams().to_proto() == (pb.Sampling(), pb.Stop())
    sampling, stop = SamplingParams(temperature=0.0, seed=2**64 - 1, max_tokens=3, stop_token_ids=[4, 5]).to_proto()
    assert sampling == pb.Sampling(temperature=0.0, seed=2**64 - 1)
    assert stop == pb.Stop(max_tokens=3, token_ids=[4, 5])


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", -1), ("seed", 2**64), ("max_tokens", 2**40), ("top_k", "x"), ("stop_token_ids", [2**40])],
)
def test_a_value_out_of_range_is_named(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value}).to_proto()
