"""Real processes, real sockets: what a user sees of one server for text and images."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from PIL import Image

from airside.proto import airside_pb2 as pb
from tests.checkpoints import IMAGE_TOKEN_ID, VOCAB_SIZE, make_idefics3, make_llama
from tests.real_processes import wait_until
from tests.system.local_server import LocalServer, read_failing

pytestmark = pytest.mark.slow

GREEDY = {"sampling": pb.Sampling(temperature=0)}


def stop(max_tokens: int) -> pb.Stop:
    return pb.Stop(max_tokens=max_tokens, ignore_eos=True)


def picture(width: int, height: int, kind: str = "PNG") -> bytes:
    """A gradient: it compresses well, so that a large one is a small file that takes long to decode and resize."""
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((width, height)).convert("RGB").save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    model = make_idefics3(tmp_path_factory.mktemp("idefics3"))
    vision = {"arena": "64MiB", "limits": {"max_images_per_prompt": 3}}
    with LocalServer(model, vision=vision, engine={"max_num_seqs": 16}) as running:
        yield running


@pytest.fixture(scope="module")
def text_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    model = make_llama(tmp_path_factory.mktemp("llama"))
    with LocalServer(model) as running:
        yield running


def test_a_text_request(server: LocalServer) -> None:
    answer = server.generate(prompt="The small red circle", stop=stop(12), **GREEDY)
    assert answer.kinds[0] == "accepted"
    assert answer.kinds.count("finished") == 1
    assert answer.kinds[-1] == "finished"
    assert (answer.finished.reason, answer.finished.usage.completion_tokens) == ("length", 12)
    assert len(answer.token_ids) == 12
    again = server.generate(
        token_ids=pb.TokenIds(ids=tokens_of(server, "The small red circle")), stop=stop(12), **GREEDY
    )
    assert again.token_ids == answer.token_ids


def tokens_of(server: LocalServer, text: str) -> list[int]:
    return list(server.inference.Tokenize(pb.TokenizeRequest(text=text)).token_ids)


def test_an_image_request(server: LocalServer) -> None:
    answer = server.generate(
        prompt="<image>What is it?",
        images=[pb.Image(data=picture(60, 40, "JPEG"))],
        stop=stop(5),
        **GREEDY,
    )
    assert answer.kinds[:2] == ["accepted", "image_ready"]
    usage = answer.finished.usage
    assert usage.image_tokens > 4
    assert usage.prompt_tokens == usage.image_tokens + len(tokens_of(server, "What is it?"))


def test_a_seed_decides_and_the_server_says_which(server: LocalServer) -> None:
    request = {"prompt": "The", "stop": stop(20)}
    first = server.generate(sampling=pb.Sampling(temperature=1.0), **request)
    again = server.generate(sampling=pb.Sampling(temperature=1.0, seed=first.accepted.seed), **request)
    other = server.generate(sampling=pb.Sampling(temperature=1.0, seed=first.accepted.seed + 1), **request)
    assert again.token_ids == first.token_ids
    assert other.token_ids != first.token_ids


def test_neighbours_change_nothing(server: LocalServer) -> None:
    requests = [
        {"prompt": "red " * n, "sampling": pb.Sampling(temperature=0.8, seed=n), "stop": stop(20)} for n in range(1, 9)
    ]
    alone = [server.generate(**request).token_ids for request in requests]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda request: server.generate(**request).token_ids, reversed(requests)))
    assert together[::-1] == alone


def test_text_passes_a_slow_picture(server: LocalServer) -> None:
    """With the one vision worker busy on 16 megapixels, text requests sent after it finish before it is even ready."""
    events: list[str] = []
    asked = threading.Event()

    def ask_about_picture() -> None:
        request = pb.GenerateRequest(
            prompt="<image>?", images=[pb.Image(data=picture(4096, 3906))], stop=stop(4), **GREEDY
        )
        for event in server.inference.Generate(request, timeout=120):
            events.append(event.WhichOneof("event"))
            asked.set()

    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(ask_about_picture)
        assert asked.wait(30)
        for number in range(5):
            answer = server.generate(prompt=f"Quick {number}", stop=stop(4), **GREEDY)
            assert answer.finished.reason == "length"
            assert "image_ready" not in events, "the picture was ready before the text was done"
        slow.result()
    assert events[-1] == "finished"
    assert "image_ready" in events


def test_a_broken_picture_ends_its_own_request_only(server: LocalServer) -> None:
    good = picture(400, 300, "JPEG")
    images = [pb.Image(data=good), pb.Image(data=good[: len(good) // 2])]
    with ThreadPoolExecutor(1) as pool:
        neighbour = pool.submit(server.generate, prompt="The", stop=stop(100), **GREEDY)
        call = server.inference.Generate(
            pb.GenerateRequest(prompt="<image><image>", images=images, **GREEDY), timeout=60
        )
        events, error = read_failing(call)
        assert neighbour.result().finished.reason == "length"
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "image 1: truncated" in error.details()
    ends = [event.finished for event in events if event.HasField("finished")]
    assert [(end.reason, end.detail) for end in ends] == [("vision_failed", error.details())]


def test_cancel_frees_the_blocks(server: LocalServer) -> None:
    call = server.inference.Generate(pb.GenerateRequest(prompt="The", stop=stop(1000), **GREEDY))
    seen = [next(call).WhichOneof("event") for _ in range(3)]
    assert seen == ["accepted", "delta", "delta"]
    aborted = server.gauges().requests_finished["abort"]
    call.cancel()
    wait_until(lambda: server.gauges().kv_blocks_live == 0, 10, "blocks free")
    gauges = server.gauges()
    assert gauges.num_requests_running == gauges.num_requests_waiting == 0
    assert gauges.requests_finished["abort"] == aborted + 1
    assert gauges.kv_blocks_free == gauges.kv_blocks_total


def test_a_deadline_ends_the_request(server: LocalServer) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        server.generate(prompt="The", stop=stop(1000), timeout_s=0.3, **GREEDY)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until(lambda: server.gauges().kv_blocks_live == 0, 10, "blocks free")


def test_abort_by_name(server: LocalServer) -> None:
    call = server.inference.Generate(pb.GenerateRequest(request_id="mine", prompt="The", stop=stop(1000), **GREEDY))
    next(call)
    with pytest.raises(grpc.RpcError) as twice:
        server.generate(request_id="mine", prompt="The")
    assert twice.value.code() == grpc.StatusCode.ALREADY_EXISTS
    assert twice.value.details() == "request 'mine' is running; choose another id or abort it"
    assert server.control.Abort(pb.AbortRequest(request_id="mine")).outcome == "aborted"
    events, error = read_failing(call)
    assert error.code() == grpc.StatusCode.CANCELLED
    assert events[-1].finished.reason == "abort"
    assert server.control.Abort(pb.AbortRequest(request_id="mine")).outcome == "already_finished"
    assert server.control.Abort(pb.AbortRequest(request_id="never")).outcome == "unknown"


BAD_REQUESTS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "prompt", "is empty"),
    ({}, "prompt", ""),
    ({"prompt": "a", "sampling": pb.Sampling(temperature=-1)}, "sampling.temperature", "[0, 100]"),
    ({"prompt": "a", "sampling": pb.Sampling(temperature=float("nan"))}, "sampling.temperature", "[0, 100]"),
    ({"prompt": "a", "sampling": pb.Sampling(top_p=0)}, "sampling.top_p", "(0, 1]"),
    ({"prompt": "a", "sampling": pb.Sampling(top_k=-5)}, "sampling.top_k", "at least 0"),
    ({"prompt": "a", "sampling": pb.Sampling(min_p=2)}, "sampling.min_p", "[0, 1]"),
    ({"prompt": "a", "stop": pb.Stop(max_tokens=0)}, "stop.max_tokens", "at least 1"),
    ({"token_ids": pb.TokenIds(ids=[70, VOCAB_SIZE])}, "token_ids.ids[1]", str(VOCAB_SIZE)),
    ({"token_ids": pb.TokenIds(ids=[-1])}, "token_ids.ids[0]", "-1"),
    ({"prompt": "<image><image>", "images": [pb.Image(data=b"x")]}, "prompt", "2 image marks"),
    ({"prompt": "<image>", "images": [pb.Image(data=b"x")] * 2}, "prompt", "1 image mark"),
    ({"token_ids": pb.TokenIds(ids=[IMAGE_TOKEN_ID])}, "token_ids", "1 image mark"),
    ({"prompt": "<image>" * 4, "images": [pb.Image(data=b"x")] * 4}, "images[3]", "at most 3"),
    ({"prompt": "word " * 3000}, "prompt", "context holds 1024"),
]


@pytest.mark.parametrize(("fields", "field", "words"), BAD_REQUESTS)
def test_bad_input_names_the_field_and_the_remedy(
    server: LocalServer, fields: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        server.generate(**fields)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert field in caught.value.details()
    assert words in caught.value.details()


def test_an_image_for_a_text_model(text_server: LocalServer) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        text_server.generate(prompt="a", images=[pb.Image(data=picture(8, 8))])
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "text only" in caught.value.details()


def test_the_server_is_idle_after_all_this(server: LocalServer) -> None:
    assert server.generate(prompt="The", stop=stop(3), **GREEDY).finished.reason == "length"
    wait_until(lambda: server.gauges().num_requests_running == 0, 10, "nothing running")
    gauges = server.gauges()
    assert gauges.kv_blocks_free == gauges.kv_blocks_total
    assert dict(gauges.bus_messages_refused) == {}
    assert not server.processes.exited()
    logs = {name: server.processes.log(name) for name in ("controller", "gateway-0", "worker-0", "vision-0")}
    assert not [name for name, log in logs.items() if "Traceback" in log]


def test_workers_are_listed(server: LocalServer) -> None:
    reply = server.control.ListWorkers(pb.ListWorkersRequest())
    assert {worker.role for worker in reply.workers} >= {"controller", "gateway", "worker", "vision_worker"}
    for worker in reply.workers:
        assert worker.pid == server.processes.pid(worker.name)
        assert worker.state in ("ready", "busy")
