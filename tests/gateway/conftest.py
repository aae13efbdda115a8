from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc

from airside.controller.gateway.server import Gateway
from airside.controller.gateway.text_model import TextModel
from airside.proto.messages import GatewayHello
from airside.proto.settings import GatewaySettings
from tests.gateway.client import Client, pool_from_proto_file
from tests.gateway.scripted_controller import ScriptedController
from tests.gateway.tiny_checkpoint import write_checkpoint

IMAGE_BYTES_MAX = 1000
IMAGES_MAX = 3


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def text_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("text_checkpoint"), images=False)


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> DescriptorPool:
    return pool_from_proto_file(tmp_path_factory.mktemp("proto"))


def make_settings(run_dir: Path, checkpoint: Path) -> GatewaySettings:
    return GatewaySettings(
        endpoint=f"ipc://{run_dir}/bus",
        name="gateway-0",
        host="127.0.0.1",
        port=0,
        model_path=str(checkpoint),
        served_name="tiny",
        architecture="TinyForCausalLM",
        device="cpu",
        dtype="float32",
        tensor_parallel_size=2,
        max_model_len=100,
        max_images_per_prompt=IMAGES_MAX,
        max_image_bytes=IMAGE_BYTES_MAX,
        max_message_bytes=1 << 20,
        reflection=True,
    )


@pytest.fixture
def settings(tmp_path: Path, checkpoint: Path) -> GatewaySettings:
    return make_settings(tmp_path, checkpoint)


class RunningGateway:
    """A gateway in a thread of its own, and a channel to it."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._model = TextModel.load(settings.model_path)
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._started.wait(20)
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.port}")
        self.health = health_pb2_grpc.HealthStub(self.channel)

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        async with Gateway(self._settings, self._model) as gateway:
            self.port = gateway.port
            self.gateway = gateway
            self._started.set()
            await gateway.serve(self._stop)

    def wait_for_health(self, service: str, wanted: int) -> None:
        """Until the health service says so."""
        watch = self.health.Watch(health_pb2.HealthCheckRequest(service=service), timeout=20)
        for reply in watch:
            if reply.status == wanted:
                watch.cancel()
                return
        raise AssertionError("the health service closed the stream")

    def stop(self) -> None:
        """Closes the channel, so that no call is left to wait for, and ends the server."""
        self.channel.close()
        with contextlib.suppress(RuntimeError):  # it has stopped by itself
            self.begin_stop()
        self.wait_until_stopped()

    def begin_stop(self) -> None:
        """As a signal does. From any thread."""
        self._loop.call_soon_threadsafe(self._stop.set)

    def wait_until_stopped(self) -> None:
        """Until the server has ended."""
        self._thread.join(20)
        assert not self._thread.is_alive()


@pytest.fixture
def controller(settings: GatewaySettings) -> Iterator[ScriptedController]:
    made = ScriptedController(settings.endpoint)
    yield made
    made.hub.close()


Start = Callable[..., RunningGateway]


@pytest.fixture
def start_gateway(settings: GatewaySettings, controller: ScriptedController) -> Iterator[Start]:
    """Starts gateways with changed settings, each known to the controller and ready."""
    running: list[RunningGateway] = []

    def start(**changes: object) -> RunningGateway:
        gateway = RunningGateway(dataclasses.replace(settings, **changes))
        running.append(gateway)
        controller.expect(GatewayHello)
        if controller.state.state == "ready":
            gateway.wait_for_health("", health_pb2.HealthCheckResponse.SERVING)
        return gateway

    yield start
    for gateway in running:
        gateway.stop()


@pytest.fixture
def gateway(start_gateway: Start) -> RunningGateway:
    return start_gateway()


@pytest.fixture
def client(gateway: RunningGateway, pool: DescriptorPool) -> Client:
    return Client(pool, gateway.channel)
