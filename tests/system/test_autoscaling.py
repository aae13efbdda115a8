"""`airside up` on a Ray of its own, whose vision workers follow the load: up, down, to zero and back."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from PIL import Image

from airside.proto import airside_pb2 as pb
from tests.checkpoints import make_idefics3
from tests.cluster.up_server import PATIENCE_S, UpServer, new_home
from tests.real_processes import wait_until
from tests.system.test_cluster import ask, image_request, in_new_files, jobs_done

pytestmark = pytest.mark.slow

BURST_CLIENTS = 8


@pytest.fixture(scope="module")
def elastic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpServer]:
    """A server whose vision workers soon follow the load."""
    rules = {"max_replicas": 3, "target_media_wait_ms": 1, "upscale_delay_s": 0.5, "downscale_delay_s": 2}
    model = make_idefics3(tmp_path_factory.mktemp("model"))
    with new_home() as home:
        server = UpServer(home, model, [f"vision.autoscaling_config.{key}={value}" for key, value in rules.items()])
        try:
            server.wait_ready()
            yield server
        finally:
            server.close()


def slow_request() -> pb.GenerateRequest:
    """A picture that takes a vision worker tens of milliseconds."""
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((2000, 1500)).convert("RGB").save(buffer, "JPEG")
    request = image_request(0)
    request.images[0].data = buffer.getvalue()
    return request


def test_vision_follows_the_load_and_loses_nothing(elastic: UpServer) -> None:
    request, calm = slow_request(), threading.Event()
    others = elastic.pids("controller", "gateway", "worker")

    def ask_until_calm(channel: grpc.Channel) -> list[list[int]]:
        answers = []
        while not calm.is_set():
            answers.append(ask(channel, in_new_files(request)).token_ids)
        return answers

    with grpc.insecure_channel(elastic.address) as channel, ThreadPoolExecutor(BURST_CLIENTS) as pool:
        quiet = ask(channel, in_new_files(request)).token_ids
        burst = [pool.submit(ask_until_calm, channel) for _ in range(BURST_CLIENTS)]
        try:
            wait_until(
                lambda: len(jobs_done(elastic)) == 3 and min(jobs_done(elastic).values()) > 0,
                PATIENCE_S,
                "each of three vision workers has done something",
            )
        finally:
            calm.set()
        for client in burst:
            answers = client.result()
            assert answers
            assert all(answer == quiet for answer in answers)
    wait_until(lambda: list(jobs_done(elastic)) == ["vision-0"], PATIENCE_S, "the others are gone again")
    assert elastic.client.list_workers().vision_target == 1
    assert elastic.pids("controller", "gateway", "worker") == others
    assert re.search(r"vision_scale from=1 to=[23] why=load\n", elastic.text())
    assert re.search(r"vision_scale from=[23] to=1 why=load\n", elastic.text())


def vision_health(channel: grpc.Channel) -> int:
    request = health_pb2.HealthCheckRequest(service="vision")
    return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=10).status)


def test_vision_goes_to_zero_and_comes_back_for_the_next_picture(elastic: UpServer) -> None:
    request, statuses = slow_request(), health_pb2.HealthCheckResponse
    others = elastic.pids("controller", "gateway", "worker")
    with grpc.insecure_channel(elastic.address) as channel, ThreadPoolExecutor() as pool:
        quiet = ask(channel, in_new_files(request)).token_ids
        ranged = elastic.home.airside("scale", "vision", "0-3")
        assert (ranged.returncode, ranged.stdout) == (0, "vision workers: 0 to 3 wanted\n")
        wait_until(lambda: not jobs_done(elastic), PATIENCE_S, "nothing to do, and nobody there")
        assert elastic.client.list_workers().vision_target == 0
        assert vision_health(channel) == statuses.SERVING
        waiting = [pool.submit(ask, channel, in_new_files(request)) for _ in range(3)]
        assert all(each.result().token_ids == quiet for each in waiting)
        wait_until(lambda: not jobs_done(elastic), PATIENCE_S, "nobody there again")

        assert elastic.home.airside("scale", "vision", "0").returncode == 0
        wait_until(lambda: vision_health(channel) == statuses.NOT_SERVING, PATIENCE_S, "none are to come")
        waits = pool.submit(ask, channel, in_new_files(request))
        assert elastic.tokens()  # texts do not wait for it
        assert elastic.client.list_workers().vision_target == 0
        assert not waits.done()
        assert elastic.home.airside("scale", "vision", "1", "--wait").returncode == 0
        assert waits.result().token_ids == quiet
    assert elastic.pids("controller", "gateway", "worker") == others
