"""The text that a client reads: stop strings across tokens, characters across tokens, nothing lost, nothing leaked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from airside.proto import airside_pb2 as pb
from tests.checkpoints import make_llama
from tests.system.local_server import Answer, LocalServer

pytestmark = pytest.mark.slow

GREEDY = pb.Sampling(temperature=0)
LONG = pb.Stop(max_tokens=200)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    model = make_llama(tmp_path_factory.mktemp("llama"))
    with LocalServer(model) as running:
        yield running


def write(server: LocalServer, text: str, stop: pb.Stop = LONG, **fields: Any) -> Answer:
    """Has the model write exactly this text, by a grammar with one choice."""
    structure = pb.Structure(choice=pb.Choice(texts=[text]))
    request = pb.GenerateRequest(prompt="Write:", sampling=GREEDY, stop=stop, structure=structure, **fields)
    return Answer(list(server.inference.Generate(request, timeout=60)))


TEXT = "The señor's café, 日本語 and नमस्ते: a narrow purple aeroplane waits at the gate until it opens."


@pytest.mark.parametrize("length", [1, 2, 7, 40])
@pytest.mark.parametrize("begin", range(0, 50, 7))
def test_a_stop_string_anywhere(server: LocalServer, begin: int, length: int) -> None:
    """Cut anywhere, through tokens and beside characters of several bytes: all before the first match, not more."""
    wanted = TEXT[begin : begin + length]
    cut = TEXT.index(wanted)
    answer = write(server, TEXT, stop=pb.Stop(max_tokens=200, strings=[wanted]))
    assert answer.text == TEXT[:cut]
    assert (answer.finished.reason, answer.finished.stop_match) == ("stop", wanted)
    assert answer.finished.usage.completion_tokens == len(answer.token_ids)
    whole = write(server, TEXT, stop=pb.Stop(max_tokens=200, strings=[wanted], include_stop=True))
    assert whole.text == TEXT[: cut + length]
    assert whole.token_ids == answer.token_ids


@pytest.mark.parametrize(
    ("strings", "text", "match"),
    [
        (["narrow purple", "row p"], TEXT[: TEXT.index("row p")], "row p"),
        (["nar", "narrow"], TEXT[: TEXT.index("nar")], "nar"),
        (["narrow", "nar"], TEXT[: TEXT.index("nar")], "nar"),
        (["gate until never", "opens. And"], TEXT, ""),
    ],
    ids=["overlapping", "prefix first", "prefix last", "never reached"],
)
def test_several_stop_strings(server: LocalServer, strings: list[str], text: str, match: str) -> None:
    answer = write(server, TEXT, stop=pb.Stop(max_tokens=200, strings=strings))
    assert (answer.text, answer.finished.reason, answer.finished.stop_match) == (text, "stop", match)


TEXTS = [
    "👨‍👩‍👧‍👦 family",
    "🇩🇪🇯🇵🇧🇷",
    "漢字かな交じり文",
    "देवनागरी लिपि",
    "    four spaces, then text",
    "a\tb\nc\r\n",
]


@pytest.mark.parametrize("text", TEXTS)
def test_every_script_arrives_whole(server: LocalServer, text: str) -> None:
    answer = write(server, text, output=pb.Output(logprobs=1), stop=pb.Stop(max_tokens=200))
    assert answer.text == text
    assert not any("�" in delta.text for delta in answer.deltas)
    assert len(answer.logprobs) == len(answer.token_ids)
    spelled = b"".join(record.text for record in answer.logprobs if record.token_id != answer.token_ids[-1])
    assert spelled == text.encode(), "the true bytes of every token, the end token aside"


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_a_cut_character_is_marked_once(server: LocalServer, max_tokens: int) -> None:
    answer = write(server, "漢字かな", stop=pb.Stop(max_tokens=max_tokens))
    assert len(answer.token_ids) == max_tokens
    whole, mark = answer.text.removesuffix("�"), answer.text.endswith("�")
    assert "漢字かな".startswith(whole)
    assert mark == (max_tokens % 3 != 0)
