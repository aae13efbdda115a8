"""Structured output over gRPC: what is asked for comes out, what cannot be is refused, and nobody else notices."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import psutil
import pytest

from airside.proto import airside_pb2 as pb
from tests.checkpoints import make_llama
from tests.system.local_server import Answer, LocalServer, read_failing

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    model = make_llama(tmp_path_factory.mktemp("llama"))
    with LocalServer(model, server={"grammar": {"timeout_s": 5}}) as running:
        yield running


def ask(server: LocalServer, seed: int = 0, **structure: Any) -> Answer:
    request = pb.GenerateRequest(
        prompt="The picture is",
        structure=pb.Structure(**structure),
        sampling=pb.Sampling(temperature=1, seed=seed),
        stop=pb.Stop(max_tokens=900),
    )
    return Answer(list(server.inference.Generate(request, timeout=60)))


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 1, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "count", "tags"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(5))
def test_json_of_a_schema(server: LocalServer, seed: int) -> None:
    answer = ask(server, seed, json_schema=json.dumps(SCHEMA))
    made = json.loads(answer.text)
    assert set(made) == {"name", "count", "tags"}
    assert len(made["name"]) <= 12
    assert 1 <= made["count"] <= 99
    assert len(made["tags"]) <= 3
    assert set(made["tags"]) <= {"red", "blue"}
    assert answer.finished.reason == "stop"


def test_other_kinds(server: LocalServer) -> None:
    assert re.fullmatch("(red|blue){2,4}!", ask(server, regex="(red|blue){2,4}!").text)
    assert ask(server, choice=pb.Choice(texts=["yes", "no"])).text in ("yes", "no")
    assert re.fullmatch(r"\[+x\]+", ask(server, gbnf='root ::= "[" ("x" | root) "]"').text)
    assert re.fullmatch("(ab)+c", ask(server, lark='start: ("ab")+ "c"').text)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for level in range(depth):
        schema = {
            "oneOf": [{"type": "object", "properties": {f"a{level}": schema}}, {"type": "array", "items": schema}]
        }
    return schema


BAD: dict[str, dict[str, Any]] = {
    "empty schema text": {"json_schema": ""},
    "null": {"json_schema": "null"},
    "no JSON": {"json_schema": "{"},
    "unknown type": {"json_schema": '{"type": "strng"}'},
    "unsupported keyword": {"json_schema": '{"type": "array", "uniqueItems": true, "contains": {"type": "integer"}}'},
    "reference to nothing": {"json_schema": '{"$ref": "#/$defs/none"}'},
    "unbalanced regex": {"regex": "[a"},
    "empty choice": {"choice": pb.Choice()},
    "json_object false": {"json_object": False},
    "no start": {"lark": 'other: "a"'},
    "left recursion without end": {"gbnf": "root ::= root"},
}
PATHOLOGICAL: dict[str, dict[str, Any]] = {
    "oneOf nested 11": {"json_schema": json.dumps(nested(11))},
    "huge bounds": {"json_schema": '{"type": "array", "items": {"type": "integer"}, "minItems": 18446744073709551615}'},
    "huge repetition": {"regex": "(a{1,100000}b){1,100000}"},
    "large enum": {"json_schema": json.dumps({"enum": [f"value number {n} of very many" * 8 for n in range(20_000)]})},
}


@pytest.mark.parametrize("again", ["first", "after a good one"])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_one_is_refused_by_name(server: LocalServer, name: str, again: str) -> None:
    if again != "first":
        assert ask(server, choice=pb.Choice(texts=["yes"])).text == "yes"
    with pytest.raises(grpc.RpcError) as caught:
        ask(server, **BAD[name])
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"structure.{next(iter(BAD[name]))}" in caught.value.details()
    assert ask(server, choice=pb.Choice(texts=["yes"])).text == "yes"


def outcome(server: LocalServer, structure: dict[str, Any]) -> str:
    """The reason of its end, or the name of its status."""
    try:
        return ask(server, **structure).finished.reason
    except grpc.RpcError as error:
        name: str = error.code().name
        return name


@pytest.mark.parametrize("name", PATHOLOGICAL)
def test_a_pathological_one_holds_up_nobody(server: LocalServer, name: str) -> None:
    """Refused, or put up with, in bounded time; a text stream goes on beside it; the same comes of it again."""
    tokens: list[int] = []
    done = threading.Event()

    def canary() -> None:
        while not done.is_set():
            request = pb.GenerateRequest(
                prompt="The", sampling=pb.Sampling(temperature=0), stop=pb.Stop(max_tokens=50, ignore_eos=True)
            )
            for event in server.inference.Generate(request, timeout=60):
                tokens.extend(event.delta.token_ids)

    with ThreadPoolExecutor(1) as pool:
        singing = pool.submit(canary)
        try:
            first, second = (outcome(server, PATHOLOGICAL[name]) for _ in range(2))
        finally:
            done.set()
        singing.result()
    assert first == second
    assert first in ("INVALID_ARGUMENT", "stop", "length")
    assert len(tokens) % 50 == 0
    assert tokens, "the stream beside it stood still"
    assert ask(server, choice=pb.Choice(texts=["yes"])).text == "yes"
    assert not server.processes.exited()


def test_a_grammar_beyond_the_limit_is_refused_by_its_size(server: LocalServer) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        ask(server, **PATHOLOGICAL["large enum"])
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "bytes" in caught.value.details()


def test_anything_is_still_something(server: LocalServer) -> None:
    """The schema that allows everything gives JSON that ends."""
    for seed in range(3):
        answer = ask(server, seed, json_schema="{}")
        if answer.finished.reason == "stop":
            json.loads(answer.text)


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("n", [1, 3])
def test_one_that_fails_late_keeps_what_it_wrote(server: LocalServer, n: int, drafts: int) -> None:
    """The grammar wants a letter that the request forbids: all before it arrives, then the end says why."""
    ids = {letter: server.inference.Tokenize(pb.TokenizeRequest(text=letter)).token_ids[0] for letter in "abcdef"}
    request = pb.GenerateRequest(
        prompt="The",
        structure=pb.Structure(regex="[ab][ab][cd][cd][ef][ef]"),
        sampling=pb.Sampling(temperature=1, allowed_token_ids=[ids[letter] for letter in "abcd"]),
        output=pb.Output(logprobs=1),
        drafts=pb.Drafts(max_tokens=drafts, golden=pb.TokenIds(ids=[ids[letter] for letter in "abcdef"])),
        n=n,
    )
    events, error = read_failing(server.inference.Generate(request, timeout=60))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    for index in range(n):
        answer = Answer(events, index)
        assert re.fullmatch("[ab]{2}[cd]{2}", answer.text)
        assert len(answer.logprobs) == len(answer.token_ids) == answer.finished.usage.completion_tokens == 4
        assert answer.finished.reason == "structured_output_failed"
    assert ask(server, choice=pb.Choice(texts=["yes"])).text == "yes"


def test_a_stalled_builder_is_not_the_grammars_fault(server: LocalServer) -> None:
    """A child that stands still makes its grammar late once; the same grammar is not refused for it ever after."""
    assert ask(server, choice=pb.Choice(texts=["yes"])).text == "yes"
    (builder,) = psutil.Process(server.processes.pid("gateway-0")).children()
    os.kill(builder.pid, signal.SIGSTOP)
    first = outcome(server, {"regex": "never|seen|before"})
    assert first in ("INVALID_ARGUMENT", "UNAVAILABLE", "stop")
    assert ask(server, regex="never|seen|before").text in ("never", "seen", "before")


def test_equal_ones_at_once(server: LocalServer) -> None:
    """Sixteen continuations and their neighbours share a grammar and disturb one another in nothing."""
    request = pb.GenerateRequest(
        prompt="The", structure=pb.Structure(regex="([a-z]{3} ){5,}end"), n=16, stop=pb.Stop(max_tokens=60)
    )
    request.sampling.seed = 5
    with ThreadPoolExecutor(4) as pool:
        events = list(pool.map(lambda _: list(server.inference.Generate(request, timeout=60)), range(4)))
    texts = [[Answer(call, index).text for index in range(16)] for call in events]
    assert texts.count(texts[0]) == 4
    assert len({*texts[0]}) > 1
