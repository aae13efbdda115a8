"""`SamplingParams` as public messages: what was given and nothing else, or an error with the field's name."""

from __future__ import annotations

from typing import Any

import pytest

from airside import SamplingParams
from airside.controller.gateway.errors import RequestError
from airside.proto import airside_pb2 as pb


def test_only_what_was_given_is_set() -> None:
    assert SamplingParams().to_request() == pb.GenerateRequest()
    given = SamplingParams(temperature=0.0, seed=2**64 - 1, max_tokens=3, stop_token_ids=[4, 5]).to_request()
    assert given == pb.GenerateRequest(
        sampling=pb.Sampling(temperature=0.0, seed=2**64 - 1), stop=pb.Stop(max_tokens=3, token_ids=[4, 5])
    )


@pytest.mark.parametrize(
    ("params", "request_part"),
    [
        ({"repetition_penalty": 1.5}, {"sampling": pb.Sampling(repetition_penalty=1.5)}),
        ({"presence_penalty": 0.0}, {"sampling": pb.Sampling(presence_penalty=0.0)}),
        ({"frequency_penalty": -1.0}, {"sampling": pb.Sampling(frequency_penalty=-1.0)}),
        ({"logit_bias": {3: -5.0}}, {"sampling": pb.Sampling(logit_bias={3: -5.0})}),
        ({"allowed_token_ids": (1, 2)}, {"sampling": pb.Sampling(allowed_token_ids=[1, 2])}),
        ({"stop": "a b"}, {"stop": pb.Stop(strings=["a b"])}),
        ({"stop": ["a", "b"], "include_stop": True}, {"stop": pb.Stop(strings=["a", "b"], include_stop=True)}),
        ({"logprobs": 0, "prompt_logprobs": 2}, {"output": pb.Output(logprobs=0, prompt_logprobs=2)}),
        ({"json_schema": {"type": "object"}}, {"structure": pb.Structure(json_schema='{"type": "object"}')}),
        ({"json_schema": "{}"}, {"structure": pb.Structure(json_schema="{}")}),
        ({"json_object": True}, {"structure": pb.Structure(json_object=True)}),
        ({"regex": "a+"}, {"structure": pb.Structure(regex="a+")}),
        ({"choice": ["a", "b"]}, {"structure": pb.Structure(choice=pb.Choice(texts=["a", "b"]))}),
        ({"lark": "start: A"}, {"structure": pb.Structure(lark="start: A")}),
        ({"gbnf": "root ::= A"}, {"structure": pb.Structure(gbnf="root ::= A")}),
        ({"drafts_max": 0}, {"drafts": pb.Drafts(max_tokens=0)}),
        (
            {"golden_tokens": [1, 2], "force_golden": True, "golden_acceptance": 0.5},
            {"drafts": pb.Drafts(golden=pb.TokenIds(ids=[1, 2]), force_golden=True, golden_acceptance=0.5)},
        ),
        (
            {"n": 3, "priority": -1, "user": "u", "cache_salt": "s"},
            {"n": 3, "priority": -1, "user": "u", "cache_salt": "s"},
        ),
    ],
)
def test_every_field_has_its_place(params: dict[str, Any], request_part: dict[str, Any]) -> None:
    assert SamplingParams(**params).to_request() == pb.GenerateRequest(**request_part)
    assert SamplingParams(**params).fill(pb.ChatRequest()) == pb.ChatRequest(**request_part)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", -1),
        ("seed", 2**64),
        ("max_tokens", 2**40),
        ("top_k", "x"),
        ("stop_token_ids", [2**40]),
        ("logit_bias", {"a": 1.0}),
        ("stop", [1]),
        ("choice", [None]),
        ("golden_tokens", ["x"]),
        ("json_schema", {"a": object()}),
        ("n", 1.5),
    ],
)
def test_a_value_out_of_range_is_named(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value}).to_request()


def test_a_text_has_one_structure() -> None:
    with pytest.raises(RequestError, match="regex: contradicts the rest of json_object and regex"):
        SamplingParams(json_object=True, regex="a").to_request()
