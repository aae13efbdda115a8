"""`airside up` on a Ray of its own: scaling under load, clients of every kind, and processes that are killed."""

from __future__ import annotations

import io
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import yaml
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from PIL import Image

from airside.proto import airside_pb2 as pb
from airside.proto.airside_pb2_grpc import InferenceStub
from tests.checkpoints import make_idefics3
from tests.cluster.up_server import PATIENCE_S, Home, UpServer, alive, new_home
from tests.gateway.client import Client, pool_from_proto_file
from tests.real_processes import free_port_pair, wait_until
from tests.scrape import scrape
from tests.system.local_server import Answer, read_failing

pytestmark = pytest.mark.slow

TEXT_TOKENS = 900
NUM_IMAGE_CLIENTS = 4
GREEDY = pb.Sampling(temperature=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_idefics3(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def up(model: Path) -> Iterator[UpServer]:
    with new_home() as home:
        server = UpServer(home, model)
        try:
            server.wait_ready()
            yield server
        finally:
            server.close()


@pytest.fixture
def home() -> Iterator[Home]:
    with new_home() as made:
        yield made


@pytest.fixture
def channel(up: UpServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(up.address) as made:
        yield made


def text_request(max_tokens: int = TEXT_TOKENS) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        prompt="The small red circle", sampling=GREEDY, stop=pb.Stop(max_tokens=max_tokens, ignore_eos=True)
    )


def image_request(number: int) -> pb.GenerateRequest:
    """One of a few pictures, each of which takes a vision worker some milliseconds."""
    buffer = io.BytesIO()
    Image.linear_gradient("L").rotate(number).resize((900 - 40 * number, 700)).convert("RGB").save(buffer, "JPEG")
    return pb.GenerateRequest(
        prompt="<image>What is it?",
        images=[pb.Image(data=buffer.getvalue())],
        sampling=GREEDY,
        stop=pb.Stop(max_tokens=4, ignore_eos=True),
    )


def in_new_files(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """The same pictures in JPEG files that nobody has seen before: no cache knows them."""
    copy = pb.GenerateRequest()
    copy.CopyFrom(request)
    for image in copy.images:
        comment = os.urandom(8)
        image.data = image.data[:2] + b"\xff\xfe" + (2 + len(comment)).to_bytes(2, "big") + comment + image.data[2:]
    return copy


def ask(channel: grpc.Channel, request: pb.GenerateRequest) -> Answer:
    answer = Answer(list(InferenceStub(channel).Generate(request, timeout=2 * PATIENCE_S, wait_for_ready=True)))
    assert answer.finished.reason == "length"
    return answer


@contextmanager
def repeated(channel: grpc.Channel, requests: list[pb.GenerateRequest]) -> Iterator[list[Future[list[Answer]]]]:
    """Sends each request again and again, in new files, each from its own thread; the answers are there afterwards."""
    stop = threading.Event()

    def repeat(request: pb.GenerateRequest) -> list[Answer]:
        answers = []
        while not stop.is_set():
            answers.append(ask(channel, in_new_files(request)))
        return answers

    with ThreadPoolExecutor(len(requests)) as pool:
        futures = [pool.submit(repeat, request) for request in requests]
        try:
            yield futures
        finally:
            stop.set()


def jobs_done(up: UpServer) -> dict[str, int]:
    rows = up.client.list_workers().workers
    return {row.name: row.jobs_done for row in rows if row.role == "vision_worker" and row.state != "lost"}


def test_vision_scales_under_load_and_harms_nobody(up: UpServer, channel: grpc.Channel) -> None:
    requests = [text_request(), *(image_request(number) for number in range(NUM_IMAGE_CLIENTS))]
    quiet = [ask(channel, request).token_ids for request in requests]
    assert len(quiet[0]) == TEXT_TOKENS
    others = up.pids("controller", "gateway", "worker")
    with repeated(channel, requests) as load:
        grown = up.home.airside("scale", "vision", "3", "--wait")
        assert grown.returncode == 0, grown.stderr
        assert "3 wanted" in grown.stdout
        wait_until(lambda: min(jobs_done(up).values()) > 0, PATIENCE_S, "each vision worker has done something")
        assert len(jobs_done(up)) == 3
        shrunk = up.home.airside("scale", "vision", "1", "--wait")
        assert shrunk.returncode == 0, shrunk.stderr
        assert list(jobs_done(up)) == ["vision-0"]
    assert up.pids("controller", "gateway", "worker") == others
    for future, expected in zip(load, quiet, strict=True):
        answers = future.result()
        assert answers
        assert all(answer.token_ids == expected for answer in answers)


def test_vision_workers_give_way(up: UpServer) -> None:
    """Ray starts all its processes at a niceness of 15 unless it is told otherwise, which leaves little below."""
    [vision_worker] = up.pids("vision_worker")
    others = up.pids("controller", "gateway", "worker")
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in others} == {os.getpriority(os.PRIO_PROCESS, 0)}
    assert os.getpriority(os.PRIO_PROCESS, vision_worker) > os.getpriority(os.PRIO_PROCESS, 0)


def test_more_vision_workers_than_allowed_are_refused(up: UpServer) -> None:
    result = up.home.airside("scale", "vision", "5")
    assert result.returncode == 2
    assert (
        result.stderr
        == "INVALID_ARGUMENT: replicas is 5, but must be in [0, 4] (vision.autoscaling_config.max_replicas)\n"
    )
    assert up.client.list_workers().vision_target == 1


def generate_with(pool: DescriptorPool, channel: grpc.Channel) -> list[int]:
    call = Client(pool, channel).generate(
        timeout=PATIENCE_S, prompt="The small red", sampling={"temperature": 0}, stop={"max_tokens": 6}
    )
    return [token for event in call for token in event.delta.token_ids]


def test_a_client_made_from_the_proto_file_alone(up: UpServer, channel: grpc.Channel, tmp_path: Path) -> None:
    assert generate_with(pool_from_proto_file(tmp_path), channel) == up.tokens()


def test_a_client_made_by_reflection(up: UpServer, channel: grpc.Channel) -> None:
    assert generate_with(DescriptorPool(ProtoReflectionDescriptorDatabase(channel)), channel) == up.tokens()


@pytest.mark.parametrize("service", ["", "engine", "vision"])
def test_health(channel: grpc.Channel, service: str) -> None:
    reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_status(up: UpServer) -> None:
    result = up.home.airside("status")
    assert result.returncode == 0, result.stderr
    for words in ("Idefics3ForConditionalGeneration", "tensor parallel 1", "ready", "vision workers: 1 of 1"):
        assert words in result.stdout
    for name in ("supervisor", "controller", "gateway-0", "worker-0", "vision-0"):
        assert name in result.stdout


def test_generate(up: UpServer, tmp_path: Path) -> None:
    text = up.home.airside("generate", "The small red", "--max-tokens", "5", "--temperature", "0")
    assert text.returncode == 0, text.stderr
    assert text.stdout.strip()
    assert "prompt tokens, 5 new" in text.stderr
    picture = tmp_path / "a.jpg"
    picture.write_bytes(image_request(0).images[0].data)
    image = up.home.airside("generate", "What is it?", "--image", str(picture), "--max-tokens", "5")
    assert image.returncode == 0, image.stderr
    assert "new" in image.stderr


def test_a_broken_image_fails_with_its_cause(up: UpServer, tmp_path: Path) -> None:
    picture = tmp_path / "a.jpg"
    picture.write_bytes(image_request(0).images[0].data[:2000])
    result = up.home.airside("generate", "What is it?", "--image", str(picture))
    assert result.returncode == 2
    assert "image 0: truncated" in result.stderr


def test_two_ranks_behind_two_gateways_make_the_same_tokens(
    up: UpServer, channel: grpc.Channel, home: Home, model: Path
) -> None:
    requests = [text_request(max_tokens=64), image_request(0), image_request(1)]
    alone = [ask(channel, request).token_ids for request in requests]
    assert up.client.info().dtype == "float32"
    ports = free_port_pair()
    overrides = ["engine.tensor_parallel_size=2", "server.grpc.gateways=2", f"server.metrics.port={ports[0]}"]
    two = UpServer(home, model, overrides)
    try:
        two.wait_ready()
        assert two.client.info().tensor_parallel_size == len(two.pids("worker")) == len(two.pids("gateway")) == 2
        for _ in range(8):  # the system gives each connection to one of the gateways
            own_pool = [("grpc.use_local_subchannel_pool", 1)]
            with grpc.insecure_channel(two.address, own_pool) as other:
                assert [ask(other, request).token_ids for request in requests] == alone
        addresses = ", ".join(f"http://127.0.0.1:{port}/metrics" for port in ports)
        assert f"metrics on {addresses}\n" in two.text()
        seen = [scrape(port) for port in ports]
        assert ["airside_generation_tokens_total" in samples for samples in seen] == [True, False]
        ends = [name for name in seen[0] if name.startswith("airside_requests_finished_total")]
        assert sum(samples[name] for samples in seen for name in ends) == 8 * len(requests)
    finally:
        two.close()


def test_a_stream_outlives_its_rank(up: UpServer, channel: grpc.Channel) -> None:
    quiet = ask(channel, text_request()).token_ids
    others = up.pids("controller", "gateway", "vision_worker")
    (rank,) = up.pids("worker")
    recomputed = up.client.info().gauges.recomputed_tokens
    call = InferenceStub(channel).Generate(text_request(), timeout=2 * PATIENCE_S)
    events = [next(call) for _ in range(3)]
    os.kill(rank, signal.SIGKILL)
    answer = Answer([*events, *call])
    assert answer.token_ids == quiet
    assert up.client.info().gauges.recomputed_tokens > recomputed
    assert up.pids("controller", "gateway", "vision_worker") == others
    (new,) = up.pids("worker")
    assert new != rank


def test_images_outlive_their_vision_worker(up: UpServer, channel: grpc.Channel) -> None:
    requests = [image_request(number) for number in range(NUM_IMAGE_CLIENTS)]
    quiet = [ask(channel, request).token_ids for request in requests]
    others = up.pids("controller", "gateway", "worker")
    (lost,) = up.pids("vision_worker")
    with repeated(channel, requests) as load:
        os.kill(lost, signal.SIGKILL)
        wait_until(lambda: bool(up.pids("vision_worker") - {lost}), PATIENCE_S, "another vision worker")
        wait_until(lambda: min(jobs_done(up).values()) > 0, PATIENCE_S, "it has done something")
    for future, expected in zip(load, quiet, strict=True):
        assert all(answer.token_ids == expected for answer in future.result())
    assert up.pids("controller", "gateway", "worker") == others


@pytest.fixture(scope="module")
def impatient(model: Path) -> Iterator[UpServer]:
    """A server that soon takes silence for a hang."""
    with new_home() as home:
        server = UpServer(home, model, ["engine.step_timeout_s=3", "cluster.silence_timeout_s=3"])
        try:
            server.wait_ready()
            yield server
        finally:
            server.close()


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_stream_outlives_a_rank_that_stops_in_a_step(impatient: UpServer) -> None:
    with grpc.insecure_channel(impatient.address) as channel:
        quiet = ask(channel, text_request()).token_ids
        others = impatient.pids("controller", "gateway", "vision_worker")
        (rank,) = impatient.pids("worker")
        call = InferenceStub(channel).Generate(text_request(), timeout=2 * PATIENCE_S)
        events = [next(call) for _ in range(3)]
        os.kill(rank, signal.SIGSTOP)
        assert Answer([*events, *call]).token_ids == quiet
    assert impatient.pids("controller", "gateway", "vision_worker") == others
    assert impatient.pids("worker") != {rank}
    assert has_ended(rank)
    assert f"worker-0 (process {rank}) hangs: a step took more than 3 s" in impatient.text()


def test_an_idle_rank_that_stops_is_replaced(impatient: UpServer) -> None:
    before = impatient.tokens()
    (rank,) = impatient.pids("worker")
    os.kill(rank, signal.SIGSTOP)
    wait_until(lambda: bool(impatient.pids("worker") - {rank}) and impatient.is_ready(), PATIENCE_S, "another rank")
    assert has_ended(rank)
    assert impatient.tokens() == before


def test_images_outlive_a_vision_worker_that_stops(impatient: UpServer) -> None:
    with grpc.insecure_channel(impatient.address) as channel:
        quiet = ask(channel, image_request(0)).token_ids
        (stopped,) = impatient.pids("vision_worker")
        os.kill(stopped, signal.SIGSTOP)
        assert ask(channel, in_new_files(image_request(0))).token_ids == quiet
    assert impatient.pids("vision_worker") != {stopped}
    wait_until(lambda: has_ended(stopped), PATIENCE_S, "it is ended")


def test_a_gateway_that_stops_is_replaced(impatient: UpServer) -> None:
    before = impatient.tokens()
    (stopped,) = impatient.pids("gateway")
    os.kill(stopped, signal.SIGSTOP)
    wait_until(lambda: has_ended(stopped), PATIENCE_S, "it is ended")
    with grpc.insecure_channel(impatient.address) as channel:
        ask(channel, text_request(4))  # waits until somebody listens
    assert impatient.tokens() == before


def test_the_gateway_comes_back_on_its_port(up: UpServer) -> None:
    before = up.tokens()
    others = up.pids("controller", "worker", "vision_worker")
    (lost,) = up.pids("gateway")
    os.kill(lost, signal.SIGKILL)
    with grpc.insecure_channel(up.address) as channel:
        ask(channel, image_request(0))  # waits until somebody listens
    assert up.tokens() == before
    assert up.pids("controller", "worker", "vision_worker") == others
    assert up.pids("gateway") != {lost}


def test_the_controller_comes_back_with_as_many_vision_workers(up: UpServer, channel: grpc.Channel) -> None:
    before = up.tokens()
    assert up.home.airside("scale", "vision", "2", "--wait").returncode == 0
    (lost,) = up.pids("controller")
    call = InferenceStub(channel).Generate(text_request(), timeout=2 * PATIENCE_S)
    begun = [next(call) for _ in range(3)]
    os.kill(lost, signal.SIGKILL)
    events, error = read_failing(call)  # its request is gone, and is told so
    assert [event.finished.reason for event in [*begun, *events] if event.HasField("finished")] == ["abort"]
    assert error.code() == grpc.StatusCode.UNAVAILABLE

    def is_back() -> bool:
        try:
            return lost not in up.pids("controller") and up.is_ready() and len(up.vision_workers()) == 2
        except grpc.RpcError:
            return False

    wait_until(is_back, 2 * PATIENCE_S, "everything is there again")
    assert up.tokens() == before


def test_down_leaves_nothing(up: UpServer) -> None:
    state, processes = up.state(), up.processes()
    listed = up.pids("supervisor", "controller", "gateway", "worker", "vision_worker")
    assert len(listed) >= 5
    assert listed < {process.pid for process in processes}  # Ray's own are there too
    result = up.home.airside("down")
    assert result.returncode == 0, result.stderr
    assert f"port {up.port}: stopped" in result.stdout
    assert up.process.wait(PATIENCE_S) == 0, up.text()
    assert up.left(state) == []
    assert alive(processes) == []


# --- what is refused before anything starts ---------------------------------------------------------------------------


def refused(home: Home, model: Path, *overrides: str, port: int = 0) -> tuple[int, str]:
    """Exit status and stderr of a start that comes to nothing, and has not begun to start Ray."""
    settings = [word for override in overrides for word in ("--set", override)]
    result = home.airside("up", str(home.write_config(model, port)), *settings)
    assert "Ray" not in result.stdout
    assert home.states.all() == []
    return result.returncode, result.stderr


def test_a_busy_port_is_one_clear_line(model: Path, home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        status, text = refused(home, model, port=port)
    assert (status, text) == (1, f"server.grpc.port: 127.0.0.1:{port} is taken: Address already in use\n")


def test_a_busy_metrics_port_is_one_clear_line(model: Path, home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        status, text = refused(home, model, f"server.metrics.port={port}")
    assert status == 1
    assert text == (
        f"server.metrics.port: 127.0.0.1:{port} is taken (Address already in use); "
        "choose another port, or 0 for no metrics\n"
    )


def test_a_size_that_does_not_divide_the_heads_is_refused_with_those_that_do(model: Path, home: Home) -> None:
    status, text = refused(home, model, "engine.tensor_parallel_size=3")
    assert status == 2
    assert text.startswith("engine.tensor_parallel_size 3")
    assert "sizes that work: 1, 2" in text


def test_three_mistakes_are_named_at_once_with_their_lines(model: Path, home: Home) -> None:
    path = home.write_config(model, 0)
    config: dict[str, Any] = yaml.safe_load(path.read_text())
    assert config["vision"]["arena"] == "16MiB"
    text = path.read_text().replace("16MiB", "16Potatoes").replace("max_num_seqs", "max_seqs")
    path.write_text(text + "visio: {}\n")
    lines = path.read_text().splitlines()
    wrong = {
        name: next(number for number, line in enumerate(lines, 1) if line.strip().startswith(f"{name}:"))
        for name in ("max_seqs", "arena", "visio")
    }
    for command in (("up",), ("config", "check")):
        result = home.airside(*command, str(path))
        assert result.returncode == 2
        found = result.stderr.splitlines()
        assert len(found) == 3
        for name, number in wrong.items():
            assert any(line.startswith(f"{path}:{number}: ") and f"{name}: " in line for line in found), found


def test_config_check_and_show(model: Path, home: Home) -> None:
    path = home.write_config(model, 0)
    assert home.airside("config", "check", str(path)).stdout == f"{path}: no problems\n"
    shown = home.airside("config", "show", str(path), "--set", "vision.autoscaling_config.min_replicas=2").stdout
    assert yaml.safe_load(shown)["vision"] | {"arena": "16MiB"} == yaml.safe_load(shown)["vision"]
