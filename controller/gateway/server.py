"""The gateway process: loads the text side, connects to the controller, serves gRPC until told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from airside.controller.gateway.control import Control
from airside.controller.gateway.controller_link import ControllerLink
from airside.controller.gateway.decoding import TolerantDecoding
from airside.controller.gateway.engine_metrics import EngineCollector
from airside.controller.gateway.errors import AddressBusy, ModelFilesError
from airside.controller.gateway.grammar_check import GrammarChecker
from airside.controller.gateway.inference import Inference
from airside.controller.gateway.metrics_server import MetricsServer
from airside.controller.gateway.request_metrics import RequestMetrics
from airside.controller.gateway.text_model import TextModel
from airside.proto import airside_pb2 as pb
from airside.proto import airside_pb2_grpc as pb_grpc
from airside.proto.channel import AsyncLink
from airside.proto.garbage import keep_what_is_loaded
from airside.proto.messages import GatewayHello
from airside.proto.settings import GatewaySettings

log = logging.getLogger(__name__)

EXIT_ADDRESS_BUSY = 3
EXIT_MODEL_FILES = 4

CALLS_MAX = 4096
"""Calls in progress at once; more are refused with RESOURCE_EXHAUSTED by the gRPC runtime."""

_LAST_WORDS_S = 0.5  # for the status of a call whose stream has just ended

_health: Any = health  # Any: its type stubs do not know the asyncio half
_OVERALL, _ENGINE, _VISION = "", "engine", "vision"  # service names of grpc.health.v1


class Gateway:
    """A running gRPC server. Use as an async context manager; `serve` returns when it is to stop.

    Args:
        settings: of this process.
        model: the text side of the checkpoint.
    """

    def __init__(self, settings: GatewaySettings, model: TextModel) -> None:
        self._settings = settings
        self._bus = AsyncLink(settings.endpoint, settings.name)
        self._metrics = RequestMetrics()
        self._metrics_server: MetricsServer | None = None
        self.link = ControllerLink(self._bus, GatewayHello(settings.node, os.getpid()), self._metrics)
        self._grammars = GrammarChecker(settings, model)
        self._health = _health.aio.HealthServicer()
        self._server = grpc.aio.server(
            interceptors=(TolerantDecoding(pb.DESCRIPTOR.package),),
            options=_options(settings),
            maximum_concurrent_rpcs=CALLS_MAX,
        )
        self._inference = Inference(settings, model, self.link, self._grammars, self._metrics)
        pb_grpc.add_InferenceServicer_to_server(self._inference, self._server)
        pb_grpc.add_ControlServicer_to_server(Control(settings, model, self.link), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if settings.reflection:
            reflection.enable_server_reflection(_service_names(), self._server)
        self.port = 0
        """The port that is listened on; differs from the settings' when that is 0."""

    async def __aenter__(self) -> Self:
        """Binds the ports. Raises AddressBusy."""
        host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
        address = f"{host}:{self._settings.port}"
        await self._tell_health()
        try:
            self.port = self._bind(address)
            self._metrics_server = self._serve_metrics()
        except AddressBusy:
            self._close()
            raise
        await self._server.start()
        log.info("listening address=%s:%d model=%s", host, self.port, self._settings.served_name)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Leaves the bus, and ends the process that checks grammars."""
        if self._metrics_server is not None:
            await asyncio.to_thread(self._metrics_server.close)  # a scrape under way needs the loop
        self._close()

    def _bind(self, address: str) -> int:
        """The port that gRPC listens on. Raises AddressBusy."""
        try:
            return int(self._server.add_insecure_port(address))
        except RuntimeError as error:
            raise AddressBusy(f"cannot listen on {address}: {error}; is another server running there?") from error

    def _serve_metrics(self) -> MetricsServer | None:
        """None: the settings want none. Raises AddressBusy."""
        settings, registry = self._settings, self._metrics.registry
        if settings.metrics_port is None:
            return None
        if settings.metrics_of_engine:
            registry.register(EngineCollector(self.link, asyncio.get_running_loop()))
        return MetricsServer(settings.metrics_host, settings.metrics_port, registry)

    def _close(self) -> None:
        self._grammars.close()
        self._bus.close()

    async def serve(self, stop: asyncio.Event) -> None:
        """Serves until `stop` is set or the controller says so; then stops gracefully."""
        link = self.link
        works = (link.run(), link.keep_alive(), link.watch_membership(), self._follow_state())
        tasks = [asyncio.create_task(work) for work in works]
        stops = [asyncio.create_task(event.wait()) for event in (stop, link.shutdown)]
        try:
            done, _ = await asyncio.wait([*tasks, *stops], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # one of ours that ended has failed: the process ends with its error
            await self._stop_gracefully()
        finally:
            for task in (*tasks, *stops):
                task.cancel()
            await asyncio.gather(*tasks, *stops, return_exceptions=True)
            await self._server.stop(None)

    async def _stop_gracefully(self) -> None:
        """Takes no new calls from here on; waits for texts under way, but not for those who watch health for ever."""
        log.info("stopping streams=%d", len(self.link.streams))
        await self._health.enter_graceful_shutdown()
        grace_s = self._settings.stop_grace_s
        refusing = asyncio.create_task(self._server.stop(grace_s + _LAST_WORDS_S))
        try:
            await asyncio.wait_for(self._inference.drained(), grace_s)
        except TimeoutError:
            self.link.streams.lose_all(f"the server is shutting down, and its grace of {grace_s:g} s is over")
        await self._server.stop(_LAST_WORDS_S)
        await refusing

    async def _follow_state(self) -> None:
        while True:
            await self.link.changed.wait()
            self.link.changed.clear()
            await self._tell_health()

    async def _tell_health(self) -> None:
        state = self.link.state
        ready = state is not None and state.state == "ready"
        vision = state is not None and state.vision_ready
        for service, serving in ((_OVERALL, ready), (_ENGINE, ready), (_VISION, vision)):
            statuses = health_pb2.HealthCheckResponse
            await self._health.set(service, statuses.SERVING if serving else statuses.NOT_SERVING)


def run(settings: GatewaySettings) -> int:
    """The whole process, until SIGTERM, SIGINT or the controller's `Shutdown`; returns its exit code."""
    logging.basicConfig(
        stream=sys.stderr,
        level=settings.log_level.upper(),
        format=f"%(asctime)s %(levelname)s {settings.name} %(message)s",
    )
    try:
        model = TextModel.of(settings)
        asyncio.run(_serve(settings, model))
    except ModelFilesError as error:
        log.error("model cannot be served: %s", error)
        return EXIT_MODEL_FILES
    except AddressBusy as error:
        log.error("%s", error)
        return EXIT_ADDRESS_BUSY
    return 0


async def _serve(settings: GatewaySettings, model: TextModel) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with Gateway(settings, model) as gateway:
        keep_what_is_loaded()
        await gateway.serve(stop)


def _options(settings: GatewaySettings) -> Sequence[tuple[str, int]]:
    return (
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.so_reuseport", int(settings.reuse_port)),
        # Of calls that wait to be taken in, gRPC would cancel some at random beyond a thousand, with not a word; the
        # limit on calls answers with a status.
        ("grpc.server.max_pending_requests", 4 * CALLS_MAX),
        ("grpc.server.max_pending_requests_hard_limit", 4 * CALLS_MAX),
        # Clients may ping as often as every 5 s, also while no token comes and while no call is open.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        # And the server pings, to find clients that are gone without a word.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),
    )


def _service_names() -> list[str]:
    ours = [service.full_name for service in pb.DESCRIPTOR.services_by_name.values()]
    return [*ours, health.SERVICE_NAME, reflection.SERVICE_NAME]
