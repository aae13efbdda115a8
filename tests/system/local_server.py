"""A whole server of real processes on one machine, without Ray: what the system tests talk to over gRPC."""

from __future__ import annotations

import dataclasses
import os
import secrets
import signal
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from airside.cluster.config.schema import Config
from airside.cluster.launch_plan import LaunchPlan, Machine, Run
from airside.cluster.local_processes import LocalProcesses
from airside.proto import airside_pb2 as pb
from airside.proto.airside_pb2_grpc import ControlStub, InferenceStub
from airside.workers.model_config import load_model_config
from tests.real_processes import free_port, wait_until

START_TIMEOUT_S = 120.0


class LocalServer:
    """Controller, gateway, ranks and vision workers for one checkpoint.

    Args:
        model: the checkpoint.
        kv_blocks: in the pool; None: as the configuration says.
        config: blocks of the YAML file that differ from the defaults; metrics are served only where they say so.
    """

    def __init__(self, model: Path, /, *, kv_blocks: int | None = None, **config: Any) -> None:
        model_block = {"source": str(model), "dtype": "float32", **config.pop("model", {})}
        server_block = {"metrics": {"port": 0}, **config.pop("server", {})}
        checked = Config.model_validate({"model": model_block, "server": server_block, **config})
        self._kv_blocks = kv_blocks
        self.processes = LocalProcesses()
        run = Run(secrets.token_hex(4), self.processes.run_dir)
        machine = Machine("local", os.cpu_count() or 1, 0)
        self.plan = LaunchPlan(checked, load_model_config(model), model, run, machine, free_port())
        self.address = f"127.0.0.1:{self.plan.port}"

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.processes.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.channel.close()
        self.processes.stop()
        left = [path.name for path in Path("/dev/shm").glob(f"{self.plan.run.segment_prefix}*")]
        assert not left, f"shared memory left behind: {left}"

    def _start(self) -> None:
        self.processes.start("controller", self.plan.controller())
        for gateway in self.plan.gateways():
            self.processes.start(gateway.name, gateway)
        for worker in self.plan.workers(group=1):
            self.processes.start(worker.name, dataclasses.replace(worker, num_kv_blocks_max=self._kv_blocks))
        for number in range(self.plan.vision_replicas):
            self.start_vision_worker(number)
        self.channel = grpc.insecure_channel(self.address)
        self.inference = InferenceStub(self.channel)
        self.control = ControlStub(self.channel)
        wait_until(self._is_ready, START_TIMEOUT_S, "server ready")

    def start_vision_worker(self, number: int) -> None:
        settings = self.plan.vision_worker(number)
        self.processes.start(settings.name, settings)

    def replace_ranks(self, group: int, how: signal.Signals) -> None:
        """Sends all ranks a signal and starts another launch of them; from the thread that made this server.

        Args:
            group: number of the new launch, counted from 1.
            how: SIGKILL, or SIGSTOP for ranks that hang until the new ones take over.
        """
        old = [self.processes.pid(self._rank_name(worker.name, group - 1)) for worker in self.plan.workers(group)]
        for pid in old:
            os.kill(pid, how)
        for worker in self.plan.workers(group):
            settings = dataclasses.replace(worker, num_kv_blocks_max=self._kv_blocks)
            self.processes.start(self._rank_name(worker.name, group), settings)
        if how is not signal.SIGKILL:
            wait_until(lambda: f"launch={group}" in self.processes.log("controller"), START_TIMEOUT_S, "new ranks")
            for pid in old:
                os.kill(pid, signal.SIGKILL)

    @staticmethod
    def _rank_name(name: str, group: int) -> str:
        return name if group == 1 else f"{name}-launch-{group}"

    def _is_ready(self) -> bool:
        exited = self.processes.exited()
        assert not exited, {name: self.processes.log(name)[-3000:] for name in exited}
        try:
            info = self.control.GetServerInfo(pb.GetServerInfoRequest(), timeout=5)
            vision_up = info.gauges.vision_workers >= self.plan.vision_replicas
        except grpc.RpcError:
            return False
        return info.state == "ready" and vision_up

    def gauges(self) -> pb.Gauges:
        return self.control.GetServerInfo(pb.GetServerInfoRequest(), timeout=10).gauges

    def is_at_rest(self) -> bool:
        """Whether nothing of any request is left: what memory is in use for pictures is the cache's."""
        gauges = self.gauges()
        is_idle = gauges.num_requests_running == gauges.num_requests_waiting == gauges.kv_blocks_live == 0
        nothing_waits = gauges.vision_queue_depth == gauges.image_bytes_waiting == 0
        return is_idle and nothing_waits and self.shared_memory() <= gauges.image_cache_bytes + (1 << 20)

    def shared_memory(self) -> int:
        """Bytes in use by the segments of its vision workers."""
        segments = Path("/dev/shm").glob(f"{self.plan.run.segment_prefix}*")
        return sum(path.stat().st_blocks * 512 for path in segments)

    def generate(self, timeout_s: float = 60, **fields: Any) -> Answer:
        """Sends one request and reads it to its end."""
        return Answer(list(self.inference.Generate(pb.GenerateRequest(**fields), timeout=timeout_s)))


class Answer:
    """The events of one continuation, in parts.

    Args:
        events: of a whole call.
        index: which of n continuations.
    """

    def __init__(self, events: list[pb.GenerateEvent], index: int = 0) -> None:
        self.kinds = [event.WhichOneof("event") for event in events]
        self.accepted = next((event.accepted for event in events if event.HasField("accepted")), pb.Accepted())
        ends = [event.finished for event in events if event.HasField("finished") and event.finished.index == index]
        assert len(ends) == 1, f"{len(ends)} ends of one continuation"
        self.finished = ends[0]
        self.deltas = [event.delta for event in events if event.HasField("delta") and event.delta.index == index]
        self.token_ids = [token_id for delta in self.deltas for token_id in delta.token_ids]
        self.text = "".join(delta.text for delta in self.deltas)
        self.logprobs = [record for delta in self.deltas for record in delta.logprobs]
        self.prompt_logprobs = [record for delta in self.deltas for record in delta.prompt_logprobs]


def read_failing(call: Iterable[pb.GenerateEvent]) -> tuple[list[pb.GenerateEvent], grpc.RpcError]:
    """All events of a stream that ends with a status other than OK, and that status."""
    events: list[pb.GenerateEvent] = []
    try:
        for event in call:
            events.append(event)
    except grpc.RpcError as error:
        return events, error
    raise AssertionError("the stream ended with OK")
