"""Every way in which a request can end, on real processes over gRPC: one finish, its reason, its cause, its status."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from PIL import Image

from airside.proto import airside_pb2 as pb
from tests.checkpoints import make_idefics3, make_llama
from tests.real_processes import wait_until
from tests.system.local_server import LocalServer, read_failing

pytestmark = pytest.mark.slow

Code = grpc.StatusCode
GREEDY = pb.Sampling(temperature=0)
MAX_MODEL_LEN = 400


def picture(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((width, height)).convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    model = make_idefics3(tmp_path_factory.mktemp("idefics3"))
    with LocalServer(
        model, model={"source": str(model), "dtype": "float32", "max_model_len": MAX_MODEL_LEN}
    ) as running:
        yield running


@pytest.fixture(scope="module")
def stopping_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """Eight blocks, and whoever loses them ends."""
    model = make_llama(tmp_path_factory.mktemp("llama"))
    engine = {"preemption": "stop", "max_num_seqs": 8}
    with LocalServer(model, kv_blocks=8, engine=engine) as running:
        yield running


@dataclass(frozen=True)
class End:
    """A request, and the end it must come to."""

    request: dict[str, Any]
    reason: str
    detail: str  # a part of it
    status: grpc.StatusCode = Code.OK
    num_tokens: int | None = None
    usage: dict[str, int] = field(default_factory=dict)


def greedy(**fields: Any) -> dict[str, Any]:
    return {"prompt": "The small red circle", "sampling": GREEDY, **fields}


ENDS = {
    "stop token": End(
        greedy(sampling=pb.Sampling(temperature=0, allowed_token_ids=[70]), stop=pb.Stop(token_ids=[70])),
        "stop",
        "token 70",
        num_tokens=1,
    ),
    "stop string": End(
        greedy(structure=pb.Structure(regex="one two three"), stop=pb.Stop(strings=["tw"])), "stop", "tw"
    ),
    "end of a grammar": End(greedy(structure=pb.Structure(choice=pb.Choice(texts=["red", "blue"]))), "stop", "token"),
    "max_tokens": End(greedy(stop=pb.Stop(max_tokens=7, ignore_eos=True)), "length", "max_tokens 7", num_tokens=7),
    "context full": End(
        {"token_ids": pb.TokenIds(ids=[70] * 390), "sampling": GREEDY, "stop": pb.Stop(ignore_eos=True)},
        "length",
        f"the context of {MAX_MODEL_LEN} tokens is full",
        num_tokens=MAX_MODEL_LEN - 390,
    ),
    "picture that does not fit": End(
        {"prompt": "<image>" * 16, "images": [pb.Image(data=picture(64, 64))] * 16, "sampling": GREEDY},
        "prompt_length_exceeded",
        f"the context of {MAX_MODEL_LEN} tokens leaves room for {MAX_MODEL_LEN - 1}",
        Code.INVALID_ARGUMENT,
        num_tokens=0,
    ),
    "broken picture": End(
        {"prompt": "<image>?", "images": [pb.Image(data=picture(640, 480)[:500])], "sampling": GREEDY},
        "vision_failed",
        "image 0: ",
        Code.INVALID_ARGUMENT,
        num_tokens=0,
    ),
    "grammar that allows nothing": End(
        greedy(
            sampling=pb.Sampling(temperature=0, allowed_token_ids=[70]),
            structure=pb.Structure(regex="[0-9]{4}"),
        ),
        "structured_output_failed",
        "grammar",
        Code.FAILED_PRECONDITION,
        num_tokens=0,
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_ends(server: LocalServer, name: str) -> None:
    end = ENDS[name]
    before = server.gauges().requests_finished[end.reason]
    call = server.inference.Generate(pb.GenerateRequest(**end.request), timeout=60)
    if end.status is Code.OK:
        events = list(call)
    else:
        events, error = read_failing(call)
        assert error.code() is end.status
    finished = [event.finished for event in events if event.HasField("finished")]
    assert len(finished) == 1
    assert events[-1].HasField("finished")
    assert finished[0].reason == end.reason
    assert end.detail in finished[0].detail
    token_ids = [token_id for event in events for token_id in event.delta.token_ids]
    assert finished[0].usage.completion_tokens == len(token_ids)
    if end.num_tokens is not None:
        assert len(token_ids) == end.num_tokens
    assert server.gauges().requests_finished[end.reason] == before + 1


REFUSALS: dict[str, tuple[dict[str, Any], grpc.StatusCode, str]] = {
    "no picture bytes": (
        {"prompt": "<image>", "images": [pb.Image(data=b"")]},
        Code.INVALID_ARGUMENT,
        "images[0].data",
    ),
    "a grammar that cannot be built": (
        greedy(structure=pb.Structure(json_schema='{"type": "strng"}')),
        Code.INVALID_ARGUMENT,
        "structure.json_schema",
    ),
    "a prompt that never fits the context": (
        {"token_ids": pb.TokenIds(ids=[70] * MAX_MODEL_LEN)},
        Code.INVALID_ARGUMENT,
        f"has {MAX_MODEL_LEN} tokens, but the context holds {MAX_MODEL_LEN}",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_known_at_once(server: LocalServer, name: str) -> None:
    """What is known before it is queued is a status, without any event."""
    fields, code, words = REFUSALS[name]
    events, error = read_failing(server.inference.Generate(pb.GenerateRequest(**fields), timeout=60))
    assert events == []
    assert error.code() is code
    assert words in error.details()


def test_a_prompt_that_never_fits_the_pool(stopping_server: LocalServer) -> None:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[70] * (8 * 16)))
    events, error = read_failing(stopping_server.inference.Generate(request, timeout=60))
    assert events == []
    assert error.code() is Code.RESOURCE_EXHAUSTED
    assert "the KV pool of 128 tokens leaves room for 127" in error.details()


def test_preempted_under_the_stop_policy(stopping_server: LocalServer) -> None:
    """Four requests grow to 50 tokens, of 128 that fit. Who has to give way keeps the text it had."""
    requests = [
        pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[70 + i] * 10), sampling=GREEDY, stop=pb.Stop(max_tokens=40, ignore_eos=True)
        )
        for i in range(4)
    ]

    def ask(request: pb.GenerateRequest) -> tuple[list[pb.GenerateEvent], grpc.StatusCode]:
        events: list[pb.GenerateEvent] = []
        try:
            for event in stopping_server.inference.Generate(request, timeout=60):
                events.append(event)
        except grpc.RpcError as error:
            return events, error.code()
        return events, Code.OK

    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(ask, requests))
    by_reason: dict[str, list[grpc.StatusCode]] = {}
    for events, code in outcomes:
        ends = [event.finished for event in events if event.HasField("finished")]
        assert len(ends) == 1
        made = [token_id for event in events for token_id in event.delta.token_ids]
        assert len(made) == ends[0].usage.completion_tokens
        by_reason.setdefault(ends[0].reason, []).append(code)
        if ends[0].reason != "length":
            assert "needed its KV blocks" in ends[0].detail
    assert set(by_reason["insufficient_system_resource"]) == {Code.RESOURCE_EXHAUSTED}
    assert by_reason["length"], "somebody must get through"


def test_aborted_by_name_with_the_text_it_had(server: LocalServer) -> None:
    request = pb.GenerateRequest(request_id="x", prompt="The", sampling=GREEDY, stop=pb.Stop(ignore_eos=True), n=2)
    call = server.inference.Generate(request, timeout=60)
    assert next(call).WhichOneof("event") == "accepted"
    next(call)
    assert server.control.Abort(pb.AbortRequest(request_id="x")).outcome == "aborted"
    events, error = read_failing(call)
    ends = [event.finished for event in events if event.HasField("finished")]
    assert sorted((end.index, end.reason, end.detail) for end in ends) == [
        (index, "abort", "aborted by Control.Abort") for index in range(2)
    ]
    assert error.code() is Code.CANCELLED


@pytest.mark.parametrize("where", ["decode", "vision", "queue"])
def test_a_deadline_in_every_state(server: LocalServer, where: str) -> None:
    """The controller's own clock ends a request that is late, wherever it is."""
    before = server.gauges().requests_finished["abort"]
    fields = greedy(stop=pb.Stop(ignore_eos=True), n=16)
    timeout_s = 0.3
    neighbours: list[Any] = []
    if where == "decode":
        began_s = time.monotonic()
        server.generate(**fields)
        timeout_s = (time.monotonic() - began_s) / 4  # however fast the model is
    if where == "vision":
        fields = {"prompt": "<image>", "images": [pb.Image(data=picture(4000, 3000))]}
        timeout_s = 0.05
    if where == "queue":  # as many as run at once, so that one more has to wait
        neighbours = [
            server.inference.Generate(pb.GenerateRequest(**greedy(stop=pb.Stop(ignore_eos=True), n=16)), timeout=60)
            for _ in range(5)
        ]
        fields["priority"] = 5
    with pytest.raises(grpc.RpcError) as caught:
        server.generate(timeout_s=timeout_s, **fields)
    assert caught.value.code() is Code.DEADLINE_EXCEEDED
    for neighbour in neighbours:
        neighbour.cancel()
    wait_until(lambda: server.gauges().requests_finished["abort"] > before, 10, "the late one ended")
    wait_until(lambda: server.gauges().kv_blocks_live == 0, 10, "blocks free")


def test_reasons_add_up(server: LocalServer) -> None:
    gauges = server.gauges()
    assert gauges.num_requests_running == gauges.num_requests_waiting == 0
    assert set(gauges.requests_finished) == {
        "stop",
        "length",
        "abort",
        "prompt_length_exceeded",
        "insufficient_system_resource",
        "vision_failed",
        "structured_output_failed",
    }
