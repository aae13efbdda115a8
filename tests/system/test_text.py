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


def held_back(answer: Answer, whole: str) -> int:
    """The most characters that had been made, and could be read, but were not given out, over the whole answer."""
    most = 0
    made, given = b"", ""
    for delta in answer.deltas:
        made += b"".join(record.text for record in delta.logprobs)
        given += delta.text
        most = max(most, len(made.decode(errors="ignore")) - len(given))
    assert made.decode(errors="ignore").startswith(whole)
    return most


@pytest.mark.parametrize("strings", [["zzz"], ["narrow purple aeroplane waits for nobody"], ["\n", "s" * 30], []])
def test_nothing_is_held_back_for_longer_than_a_stop_string_is(server: LocalServer, strings: list[str]) -> None:
    """A stop string that never comes delays no character by more than its own length, and loses none."""
    stop = pb.Stop(max_tokens=200, strings=strings, ignore_eos=True)
    answer = write(server, TEXT, stop=stop, output=pb.Output(logprobs=0))
    assert answer.text == TEXT
    longest = max(map(len, strings), default=1)
    assert held_back(answer, TEXT) < longest + len("<|im_end|>")


FAMILY = "👨‍👩‍👧‍👦"
FLAGS = "🇩🇪🇯🇵🇧🇷"


@pytest.mark.parametrize("text", [f"a{FAMILY}b{FAMILY}c", f"a{FLAGS}b", "e\u0301a\u0308o", "नमस्ते"])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_stop_strings_inside_what_looks_like_one_character(server: LocalServer, text: str, length: int) -> None:
    """Joined emoji, flags and combining marks are several characters, and a stop string may cut between them."""
    for begin in range(len(text) - length + 1):
        wanted = text[begin : begin + length]
        cut = text.index(wanted)
        answer = write(server, text, stop=pb.Stop(max_tokens=200, strings=[wanted]))
        assert (answer.text, answer.finished.stop_match) == (text[:cut], wanted)
        assert not any("�" in delta.text for delta in answer.deltas)


def test_special_tokens_between_have_no_text(server: LocalServer) -> None:
    structure = pb.Structure(
        lark='start: "in " <|im_start|> "the " <|endoftext|> "mid" <fake_token_around_image> "dle"'
    )
    request = pb.GenerateRequest(
        prompt="Write:", sampling=GREEDY, stop=LONG, structure=structure, output=pb.Output(logprobs=0)
    )
    answer = Answer(list(server.inference.Generate(request, timeout=60)))
    assert answer.text == "in the middle"
    spelled = b"".join(record.text for record in answer.logprobs[:-1])
    assert spelled == b"in <|im_start|>the <|endoftext|>mid<fake_token_around_image>dle"
    across = pb.Stop(max_tokens=200, strings=["he m"])  # what a reader sees is what is matched
    request.stop.CopyFrom(across)
    assert Answer(list(server.inference.Generate(request, timeout=60))).text == "in t"


TEXTS = [
    f"{FAMILY} family",
    FLAGS,
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
