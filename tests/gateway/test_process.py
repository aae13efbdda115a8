"""The real process: `python -m airside.controller.gateway`."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from airside.controller.gateway.errors import RETRY_AFTER_S
from airside.controller.gateway.server import EXIT_ADDRESS_BUSY, EXIT_MODEL_FILES
from airside.proto.messages import AbortSequence, GatewayHello
from airside.proto.settings import GatewaySettings
from tests.gateway.client import Client, events_and_failure, failure
from tests.gateway.scripted_controller import ScriptedController, batch, finish
from tests.gateway.tiny_checkpoint import byte_level_tokenizer


@contextlib.contextmanager
def started(settings: GatewaySettings) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "airside.controller.gateway", "--settings", settings.to_json()]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def port_of(process: subprocess.Popen[str]) -> int:
    """The port in the line that says where the process listens."""
    assert process.stderr is not None
    for line in process.stderr:
        if "listening address=" in line:
            return int(line.split("address=127.0.0.1:")[1].split()[0])
    raise AssertionError("the process ended")


def wait_until_serving(channel: grpc.Channel) -> None:
    for reply in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=30):
        if reply.status == health_pb2.HealthCheckResponse.SERVING:
            return


def test_a_client_with_reflection_alone_and_a_graceful_stop(
    settings: GatewaySettings, controller: ScriptedController
) -> None:
    pings = [("grpc.keepalive_time_ms", 5000), ("grpc.keepalive_permit_without_calls", 1)]
    with started(settings) as process, grpc.insecure_channel(f"127.0.0.1:{port_of(process)}", pings) as channel:
        hello = controller.expect(GatewayHello)
        assert (hello.pid, hello.node) == (process.pid, "local")
        wait_until_serving(channel)
        reflected = ProtoReflectionDescriptorDatabase(channel)
        assert {"airside.v1.Inference", "airside.v1.Control", "grpc.health.v1.Health"} <= set(reflected.get_services())
        client = Client(DescriptorPool(reflected), channel)
        call = client.generate(prompt="the fox")
        request = controller.accept()
        assert next(call).accepted.request_id == request.request_id
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=30)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        process.send_signal(signal.SIGTERM)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        words = byte_level_tokenizer().encode(" jumps").ids
        controller.send(batch((request.seq_id, words), finished=[finish(request.seq_id)]))
        assert "".join(event.delta.text for event in call) == " jumps"
        assert process.wait(20) == 0


@pytest.mark.slow
def test_without_reflection(settings: GatewaySettings, controller: ScriptedController, pool: DescriptorPool) -> None:
    with (
        started(dataclasses.replace(settings, reflection=False)) as process,
        grpc.insecure_channel(f"127.0.0.1:{port_of(process)}") as channel,
    ):
        controller.expect(GatewayHello)
        wait_until_serving(channel)
        unimplemented = channel.unary_unary("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        with pytest.raises(grpc.RpcError) as caught:
            unimplemented(b"", timeout=20)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        call = Client(pool, channel).generate(prompt="a")
        controller.accept()
        process.kill()
        assert failure(call).code == grpc.StatusCode.UNAVAILABLE


def test_a_busy_port(settings: GatewaySettings) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with started(dataclasses.replace(settings, port=port)) as process:
            _, errors = process.communicate(timeout=60)
    assert process.returncode == EXIT_ADDRESS_BUSY
    assert f"cannot listen on 127.0.0.1:{port}" in errors
    assert "Traceback" not in errors


def test_a_folder_that_is_no_checkpoint(settings: GatewaySettings, tmp_path: Path) -> None:
    with started(dataclasses.replace(settings, model_path=str(tmp_path))) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == EXIT_MODEL_FILES
    assert f"{tmp_path} has no config.json" in errors
    assert "Traceback" not in errors


def test_settings_that_are_none() -> None:
    command = [sys.executable, "-m", "airside.controller.gateway", "--settings", "{}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "--settings" in ended.stderr


def test_calls_that_outlast_the_grace_end_with_the_reason(
    settings: GatewaySettings, controller: ScriptedController, pool: DescriptorPool
) -> None:
    settings = dataclasses.replace(settings, stop_grace_s=0.2)
    with started(settings) as process, grpc.insecure_channel(f"127.0.0.1:{port_of(process)}") as channel:
        controller.expect(GatewayHello)
        wait_until_serving(channel)
        call = Client(pool, channel).generate(prompt="a")
        request = controller.accept()
        process.send_signal(signal.SIGTERM)
        assert controller.expect(AbortSequence).seq_id == request.seq_id
        events, error = events_and_failure(call)
        assert (error.code, error.retry_after_s) == (grpc.StatusCode.UNAVAILABLE, RETRY_AFTER_S)
        assert [event.WhichOneof("event") for event in events] == ["accepted", "finished"]
        assert "shutting down" in events[-1].finished.detail
        assert process.wait(20) == 0
