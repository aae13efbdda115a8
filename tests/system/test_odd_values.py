"""Huge, odd and contradictory values of every field: refused by name, or what is documented; never worse."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import grpc
import psutil
import pytest

from airside.proto import airside_pb2 as pb
from tests.checkpoints import IMAGE_TOKEN_ID, VOCAB_SIZE, make_idefics3
from tests.real_processes import wait_until
from tests.system.local_server import Answer, LocalServer, read_failing

pytestmark = pytest.mark.slow

CONTEXT = 256
INT32_MAX = 2**31 - 1
FOUR = pb.Stop(max_tokens=4, ignore_eos=True)
GROWTH_MAX = 50 * 2**20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    model = make_idefics3(tmp_path_factory.mktemp("idefics3"))
    with LocalServer(model, model={"max_model_len": CONTEXT}, engine={"num_threads": 1}) as running:
        yield running


def alive(server: LocalServer) -> list[int]:
    """The tokens of one plain request: the same before and after whatever else was asked."""
    return server.generate(prompt="The small", sampling=pb.Sampling(temperature=0), stop=FOUR).token_ids


REFUSED: list[tuple[str, dict[str, Any]]] = [
    *(("sampling.temperature", {"sampling": pb.Sampling(temperature=t)}) for t in (math.nan, math.inf, -1, 101, 1e38)),
    *(("sampling.top_p", {"sampling": pb.Sampling(top_p=p)}) for p in (0, -1, 1.0001, math.nan, math.inf)),
    *(("sampling.top_k", {"sampling": pb.Sampling(top_k=k)}) for k in (-5, -(2**31))),
    *(("sampling.min_p", {"sampling": pb.Sampling(min_p=p)}) for p in (2, -1, math.nan)),
    *(
        ("sampling.repetition_penalty", {"sampling": pb.Sampling(repetition_penalty=p)})
        for p in (0, -1, 1e9, math.nan, math.inf)
    ),
    *(("sampling.presence_penalty", {"sampling": pb.Sampling(presence_penalty=p)}) for p in (2.1, math.nan)),
    *(("sampling.frequency_penalty", {"sampling": pb.Sampling(frequency_penalty=p)}) for p in (-2.1, math.nan)),
    *(
        (f"sampling.logit_bias[{i}]", {"sampling": pb.Sampling(logit_bias={i: 1})})
        for i in (-1, VOCAB_SIZE, INT32_MAX, -(2**31))
    ),
    *(
        ("sampling.logit_bias[70]", {"sampling": pb.Sampling(logit_bias={70: bias})})
        for bias in (math.nan, math.inf, -math.inf, 101)
    ),
    ("sampling.logit_bias", {"sampling": pb.Sampling(logit_bias=dict.fromkeys(range(1025), 1))}),
    *(
        ("sampling.allowed_token_ids[0]", {"sampling": pb.Sampling(allowed_token_ids=[i])})
        for i in (-1, VOCAB_SIZE, INT32_MAX)
    ),
    ("sampling.allowed_token_ids", {"sampling": pb.Sampling(allowed_token_ids=[70] * 5000)}),
    *(("n", {"n": n}) for n in (0, -1, 17, 5_000_000, INT32_MAX)),
    *(
        (f"output.{name}", {"output": pb.Output(**{name: k})})
        for name in ("logprobs", "prompt_logprobs")
        for k in (-1, -2, 21, 10**9)
    ),
    *(("stop.max_tokens", {"stop": pb.Stop(max_tokens=m)}) for m in (0, -1, -(2**31))),
    *(("stop.min_tokens", {"stop": pb.Stop(min_tokens=m)}) for m in (-1, CONTEXT, INT32_MAX)),
    ("stop.min_tokens", {"stop": pb.Stop(min_tokens=5, max_tokens=4)}),
    *(("stop.token_ids[0]", {"stop": pb.Stop(token_ids=[i])}) for i in (-1, VOCAB_SIZE, INT32_MAX)),
    ("stop.token_ids", {"stop": pb.Stop(token_ids=[70] * 65)}),
    ("stop.strings[1]", {"stop": pb.Stop(strings=["a", ""])}),
    ("stop.strings[0]", {"stop": pb.Stop(strings=["z" * 257])}),
    ("stop.strings", {"stop": pb.Stop(strings=["zz"] * 100_000)}),
    ("drafts.max_tokens", {"drafts": pb.Drafts(max_tokens=-1)}),
    *(
        ("drafts.golden.ids[1]", {"drafts": pb.Drafts(golden=pb.TokenIds(ids=[70, i]))})
        for i in (-1, VOCAB_SIZE, INT32_MAX, IMAGE_TOKEN_ID)
    ),
    ("drafts.golden.ids", {"drafts": pb.Drafts(golden=pb.TokenIds())}),
    ("drafts.golden.ids", {"drafts": pb.Drafts(golden=pb.TokenIds(ids=[70] * CONTEXT))}),
    ("drafts.golden.ids", {"drafts": pb.Drafts(golden=pb.TokenIds(ids=[70] * (CONTEXT - 1)), force_golden=True)}),
    *(
        ("drafts.golden_acceptance", {"drafts": pb.Drafts(golden=pb.TokenIds(ids=[70]), golden_acceptance=a)})
        for a in (-0.1, 1.1, math.nan)
    ),
    ("drafts.force_golden", {"drafts": pb.Drafts(force_golden=True)}),
    (
        "drafts.force_golden",
        {
            "drafts": pb.Drafts(force_golden=True, golden=pb.TokenIds(ids=[70])),
            "structure": pb.Structure(regex="a"),
        },
    ),
    ("request_id", {"request_id": "a\tb"}),
    ("user", {"user": "u" * 257}),
    ("cache_salt", {"cache_salt": "\0"}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": "<image>"}),
    ("prompt", {"images": [pb.Image(data=b"x")]}),
    ("token_ids.ids", {"token_ids": pb.TokenIds()}),
    *(("token_ids.ids[1]", {"token_ids": pb.TokenIds(ids=[70, i])}) for i in (-1, VOCAB_SIZE, INT32_MAX)),
    # Nothing could ever be chosen, and that is not the model's fault.
    (
        "sampling.allowed_token_ids",
        {
            "sampling": pb.Sampling(allowed_token_ids=[70]),
            "stop": pb.Stop(token_ids=[70], min_tokens=3, max_tokens=4, ignore_eos=True),
        },
    ),
    (
        "sampling.allowed_token_ids",
        {"sampling": pb.Sampling(allowed_token_ids=[IMAGE_TOKEN_ID]), "stop": pb.Stop(max_tokens=4, ignore_eos=True)},
    ),
]


@pytest.mark.parametrize(("field", "fields"), REFUSED, ids=[f"{i}-{field}" for i, (field, _) in enumerate(REFUSED)])
def test_refused_by_name(server: LocalServer, field: str, fields: dict[str, Any]) -> None:
    if not fields.keys() & {"prompt", "token_ids"}:
        fields = {"prompt": "The small red", **fields}
    before = alive(server)
    events, error = read_failing(server.inference.Generate(pb.GenerateRequest(**fields), timeout=60))
    assert events == []
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(error.details()).startswith(f"{field}: ")
    assert alive(server) == before


def test_an_empty_request(server: LocalServer) -> None:
    for call in (
        server.inference.Generate(pb.GenerateRequest(), timeout=60),
        server.inference.Chat(pb.ChatRequest(), timeout=60),
    ):
        events, error = read_failing(call)
        assert (events, error.code()) == ([], grpc.StatusCode.INVALID_ARGUMENT)


TAKEN: dict[str, dict[str, Any]] = {
    **{f"temperature {t}": {"sampling": pb.Sampling(temperature=t)} for t in (0, 1e-45, 1e-9, 100)},
    **{f"top_k {k}": {"sampling": pb.Sampling(top_k=k)} for k in (0, 1, VOCAB_SIZE, VOCAB_SIZE + 1, INT32_MAX)},
    **{f"top_p {p}": {"sampling": pb.Sampling(top_p=p)} for p in (1e-45, 1)},
    **{f"seed {s}": {"sampling": pb.Sampling(seed=s), "n": 16} for s in (0, 2**63, 2**64 - 1)},
    **{f"repetition {p}": {"sampling": pb.Sampling(repetition_penalty=p)} for p in (1e-45, 10)},
    "everything is unlikely": {"sampling": pb.Sampling(logit_bias=dict.fromkeys(range(VOCAB_SIZE), -100))},
    "the same allowed often": {"sampling": pb.Sampling(allowed_token_ids=[70] * 4096)},
    "drafts without end": {"drafts": pb.Drafts(max_tokens=INT32_MAX)},
    "long golden": {"drafts": pb.Drafts(golden=pb.TokenIds(ids=[70] * (CONTEXT - 1)))},
    "forced although not allowed": {
        "sampling": pb.Sampling(allowed_token_ids=[80]),
        "drafts": pb.Drafts(golden=pb.TokenIds(ids=[70] * 4), force_golden=True),
    },
    "long stop strings": {"stop": pb.Stop(strings=["👍" * 256, "\0"] * 8, max_tokens=4, ignore_eos=True)},
    **{f"priority {p}": {"priority": p} for p in (INT32_MAX, -(2**31))},
    "salted": {"cache_salt": "👍" * 64, "user": "👍" * 64},
    **{f"prompt {p!r}": {"prompt": p} for p in ("   ", "\0", "a", "\ufeff", "<|endoftext|>", "<|im_start|><|im_end|>")},
}


@pytest.mark.parametrize("name", TAKEN)
def test_taken_at_its_word(server: LocalServer, name: str) -> None:
    fields = {"prompt": "The small red", "stop": FOUR, **TAKEN[name]}
    before = alive(server)
    events = list(server.inference.Generate(pb.GenerateRequest(**fields), timeout=60))
    for index in range(fields.get("n", 1)):
        answer = Answer(events, index)
        assert (answer.finished.reason, len(answer.token_ids)) == ("length", 4)
        assert answer.finished.usage.completion_tokens == 4
    assert alive(server) == before


@pytest.mark.parametrize("special", [i for i in range(7) if i != IMAGE_TOKEN_ID])
def test_special_tokens_that_are_forced_have_no_text(server: LocalServer, special: int) -> None:
    """Whatever id is forced: its own bytes with the log-probability, nothing in the text; an end token ends."""
    sampling = pb.Sampling(temperature=0, logit_bias={special: 100})
    answer = server.generate(prompt="The", sampling=sampling, stop=FOUR, output=pb.Output(logprobs=0))
    assert answer.token_ids == [special] * 4
    assert answer.text == ""
    assert all(record.text.startswith(b"<") for record in answer.logprobs)
    ended = server.generate(prompt="The", sampling=sampling, stop=pb.Stop(max_tokens=4, token_ids=[special]))
    assert (ended.token_ids, ended.text, ended.finished.reason) == ([special], "", "stop")
    shown = server.generate(
        prompt="The", sampling=sampling, stop=pb.Stop(max_tokens=4, token_ids=[special], include_stop=True)
    )
    assert shown.token_ids == [special]


@pytest.mark.parametrize("min_tokens", [1, 49, 50])
def test_min_tokens_without_the_prompt(server: LocalServer, min_tokens: int) -> None:
    """All but a few ids are stop tokens: none of them comes too early, and the prompt does not count."""
    stop = pb.Stop(min_tokens=min_tokens, max_tokens=50, ignore_eos=True, token_ids=range(70, 134))
    sampling = pb.Sampling(temperature=1, seed=3, allowed_token_ids=[*range(60, 134)])
    answer = server.generate(token_ids=pb.TokenIds(ids=[65] * 60), stop=stop, sampling=sampling)
    assert min_tokens <= len(answer.token_ids) <= 50
    assert all(token_id < 70 for token_id in answer.token_ids[:min_tokens])
    assert answer.finished.reason == ("stop" if answer.token_ids[-1] >= 70 else "length")


def test_nobody_grew(server: LocalServer) -> None:
    """The largest numbers of the table again: no process takes memory for them."""
    pids = [server.processes.pid(name) for name in ("controller", "gateway-0", "worker-0")]
    before = [psutil.Process(pid).memory_info().rss for pid in pids]
    for fields in (
        {"n": 5_000_000},
        {"output": pb.Output(logprobs=10**9)},
        {"stop": pb.Stop(strings=["zz"] * 100_000)},
    ):
        for _ in range(5):
            read_failing(server.inference.Generate(pb.GenerateRequest(prompt="a", **fields), timeout=60))
    after = [psutil.Process(pid).memory_info().rss for pid in pids]
    assert all(new - old < GROWTH_MAX for new, old in zip(after, before, strict=True)), (before, after)
    wait_until(lambda: server.gauges().kv_blocks_live == 0, 10, "blocks free")
    assert not server.processes.exited()
