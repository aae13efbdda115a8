"""Five hundred requests given up at every stage: their blocks all come back, and the gauges can tell."""

from __future__ import annotations

import io
import random
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from PIL import Image

from airside.proto import airside_pb2 as pb
from airside.proto.airside_pb2_grpc import InferenceStub
from tests.checkpoints import make_idefics3
from tests.real_processes import wait_until
from tests.system.local_server import LocalServer

pytestmark = pytest.mark.slow

POOL_BLOCKS = 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    model = make_idefics3(tmp_path_factory.mktemp("idefics3"))
    with LocalServer(model, kv_blocks=POOL_BLOCKS, engine={"max_num_seqs": 8}) as running:
        yield running


def png(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((width, height)).convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


def abandon(server: LocalServer, number: int) -> grpc.StatusCode | None:
    """Sends a request and gives it up: before anything came, after `accepted`, after some tokens, or at its end.

    Returns the status that it got before that, if any.
    """
    rng = random.Random(number)
    request = pb.GenerateRequest(prompt=f"Number {number}", stop=pb.Stop(max_tokens=60, ignore_eos=True))
    if number % 4 == 0:
        request.prompt = f"<image>Number {number}"
        request.images.add(data=png(rng.choice([40, 600]), 40))
    if number % 3 == 0:
        request.structure.regex = "[a-z]{30,}"
    if number % 5 == 0:
        request.n = rng.choice([2, 4])
        request.output.MergeFrom(pb.Output(logprobs=5, prompt_logprobs=1))
    if number % 7 == 0:
        request.sampling.MergeFrom(pb.Sampling(repetition_penalty=1.1, logit_bias={100: 1}))
    call = server.inference.Generate(request, timeout=60)
    try:
        for _, _event in zip(range(rng.choice([0, 1, 2, 5, 200])), call, strict=False):
            pass
    except grpc.RpcError as error:
        return error.code()
    call.cancel()
    return None


def abandon_by_reset(server: LocalServer, number: int) -> None:
    """A client whose connection breaks: a proxy in the middle answers with a TCP reset once tokens flow."""
    host, port = server.address.split(":")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        channel = grpc.insecure_channel(f"127.0.0.1:{listener.getsockname()[1]}")
        request = pb.GenerateRequest(prompt=f"Reset {number}", stop=pb.Stop(ignore_eos=True))
        call = InferenceStub(channel).Generate(request, timeout=20)
        near, _ = listener.accept()
        far = socket.create_connection((host, int(port)))
        received = 0
        near.setblocking(False)
        far.setblocking(False)
        while received < 1500:
            received += pass_on(far, near)
            pass_on(near, far)
        for end in (near, far):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.close()
        call.cancel()
        channel.close()


def pass_on(source: socket.socket, target: socket.socket) -> int:
    try:
        data = source.recv(65536)
    except BlockingIOError:
        return 0
    target.setblocking(True)
    target.sendall(data)
    target.setblocking(False)
    return len(data)


def test_everything_comes_back(server: LocalServer) -> None:
    with ThreadPoolExecutor(16) as pool:
        statuses = set(pool.map(lambda number: abandon(server, number), range(450)))
    assert statuses <= {None, grpc.StatusCode.RESOURCE_EXHAUSTED}, "a full queue is the only way not to get in"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: abandon_by_reset(server, number), range(50)))
    wait_until(lambda: server.gauges().kv_blocks_live == 0, 10, "blocks free")
    gauges = server.gauges()
    assert gauges.num_requests_running == gauges.num_requests_waiting == gauges.vision_queue_depth == 0
    assert gauges.kv_blocks_cached > 0, "what stays in the cache is no leak, and is told apart"
    assert gauges.kv_blocks_free == gauges.kv_blocks_total == POOL_BLOCKS
    assert sum(gauges.requests_finished.values()) >= 400
    whole = server.generate(
        token_ids=pb.TokenIds(ids=[70] * (POOL_BLOCKS * 16 - 1)), stop=pb.Stop(ignore_eos=True), timeout_s=60
    )
    assert whole.finished.reason == "length"
    assert whole.finished.usage.completion_tokens == 1
