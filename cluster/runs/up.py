"""`airside up`: one server from its configuration file to its last trace, in one call."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

import airside
from airside.cluster.client import Client
from airside.cluster.config.file import load_config
from airside.cluster.config.schema import Config
from airside.cluster.environment import cache_folder, prepare_ray, variables
from airside.cluster.gpus import count_gpus
from airside.cluster.launch_plan import LaunchPlan, Machine, Network, Run
from airside.cluster.model_source import resolve
from airside.cluster.runs.leftovers import clean_dead_runs, clean_run
from airside.cluster.runs.run_state import RunStates, ServerState
from airside.cluster.runs.startup_progress import StartupProgress, Tell
from airside.cluster.runs.stop_signal import Stopped, StopSignal
from airside.proto.bus_keys import make_keys
from airside.vision_workers.segment import sweep
from airside.workers.model_config import load_model_config


class CannotStart(RuntimeError):
    """The server cannot start here; the message says why."""


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What `airside up` was told."""

    config_file: Path
    overrides: Sequence[str]


def up(options: UpOptions, states: RunStates, tell: Tell) -> int:
    """Serves until told to stop; returns the exit status, 0.

    Raises:
        ConfigError, ModelSourceError, CheckpointError, LaunchError, CannotStart, ClusterError, RunStateError,
        StartFailed, GaveUp: nothing of the run is left.
    """
    stop = StopSignal()
    stop.install()
    config = load_config(options.config_file, variables(), options.overrides)
    for state in clean_dead_runs(states):
        tell(f"cleaned up after the server on port {state.port}, whose process {state.pid} is gone")
    sweep("airside-")
    port = _choose_port(config, states)
    _check_metrics_ports(config)
    model_path = resolve(config.model.source, tell)
    run = states.new_run()
    state = _state(config, options.config_file, run, port)
    states.write(state)
    try:
        plan = LaunchPlan(config, load_model_config(model_path), model_path, run, _machine(), port)
        return _serve(plan, state, states, stop, tell)
    except Stopped:
        tell("stopped while starting")
        return 0
    finally:
        clean_run(states, state)


def _serve(plan: LaunchPlan, state: ServerState, states: RunStates, stop: StopSignal, tell: Tell) -> int:
    prepare_ray(local=plan.config.cluster.ray_address == "local")
    from airside.cluster.supervisor.ray_cluster import RayCluster  # Ray reads the environment when it is imported
    from airside.cluster.supervisor.supervisor import Supervisor

    began = time.monotonic()
    stop.check()
    address = plan.config.cluster.ray_address
    tell("starting Ray" if address == "local" else f"joining Ray at {address}")
    cluster = RayCluster(address, plan.run.directory, plan.num_cpus, plan.resources)
    stop.install()
    with ExitStack() as stack:
        stack.callback(cluster.close)
        deadline = began + plan.config.cluster.startup_timeout_s
        if plan.placement != "STRICT_PACK":
            plan = plan.over(stack.enter_context(_network(cluster.address)))
        cluster.reserve(_bundles(plan), "engine.tensor_parallel_size", deadline - time.monotonic(), tell, stop.check)
        supervisor = Supervisor(plan, cluster, stop, tell)
        grace_s = 0.0
        try:
            with Client(state.address) as client:
                progress = StartupProgress(plan, client, supervisor.vision, tell)
                supervisor.start(progress.is_ready, deadline - time.monotonic())
            states.write(dataclasses.replace(state, is_ready=True))
            if plan.config.server.metrics.port:
                tell(f"metrics on {_metrics_addresses(plan.config)}")
            tell(f"ready after {time.monotonic() - began:.1f} s: gRPC on {state.address}, Ctrl-C to stop")
            supervisor.serve()
            grace_s = plan.config.server.shutdown_timeout_s
            tell(f"stopping: running requests have up to {grace_s:g} s; Ctrl-C again stops at once")
        finally:
            supervisor.close(grace_s)
        tell("stopped")
        return 0


@contextmanager
def _network(address: str) -> Iterator[Network]:
    """The bus for other nodes, on a free port of the address that this node has in Ray. Raises CannotStart.

    Meanwhile the system gives the port to nobody else: not before the controller listens, nor between two of them.
    """
    try:
        held = _bound(address, 0)
    except OSError as error:
        raise CannotStart(
            f"cluster.placement: vision workers on other nodes need a port on {address}, which Ray has for this node: "
            f"{error.strerror or error}; start Ray here with another --node-ip-address, or set STRICT_PACK"
        ) from error
    with held:
        host = f"[{address}]" if ":" in address else address
        yield Network(f"tcp://{host}:{held.getsockname()[1]}", *make_keys())


def _bundles(plan: LaunchPlan) -> list[dict[str, float]]:
    """One per process that is always there. Controller and gateways need little, and are not counted as CPUs."""
    rank = {"CPU": 1.0} | ({"GPU": 1.0} if plan.device == "cuda" else {})
    return [{}] * (1 + plan.config.server.grpc.gateways) + [rank] * plan.config.engine.tensor_parallel_size


def _state(config: Config, config_file: Path, run: Run, port: int) -> ServerState:
    me = psutil.Process()
    return ServerState(
        port=port,
        address=f"{_reachable(config.server.grpc.host)}:{port}",
        pid=me.pid,
        process_started_at=me.create_time(),
        run_id=run.run_id,
        run_dir=str(run.directory),
        config_file=str(config_file.resolve()),
        shutdown_timeout_s=config.server.shutdown_timeout_s,
    )


def _choose_port(config: Config, states: RunStates) -> int:
    """The configured port, or any free one for 0. Raises CannotStart when it is taken."""
    host, port = config.server.grpc.host, config.server.grpc.port
    try:
        return _probe(host, port)
    except OSError as error:
        other = states.read(port)
        who = other.remedy if other else error.strerror
        raise CannotStart(f"server.grpc.port: {host}:{port} is taken: {who}") from error


def _probe(host: str, port: int) -> int:
    """The port that could be listened on: this one, or any free one for 0. Raises OSError."""
    with _bound(host, port) as probe:
        return int(probe.getsockname()[1])


def _bound(host: str, port: int) -> socket.socket:
    """Has the port, and lets another socket listen on it that is bound with SO_REUSEADDR as well. Raises OSError."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host.strip("[]"), port))
    except OSError:
        made.close()
        raise
    return made


def _reachable(host: str) -> str:
    """Where a client on this machine finds who listens on `host`."""
    return "127.0.0.1" if host in ("0.0.0.0", "::", "[::]") else host


def _check_metrics_ports(config: Config) -> None:
    """Raises CannotStart when a port that a gateway is to serve metrics on is taken."""
    for port in _metrics_ports(config):
        try:
            _probe(config.server.metrics.host, port)
        except OSError as error:
            raise CannotStart(
                f"server.metrics.port: {config.server.metrics.host}:{port} is taken ({error.strerror}); "
                "choose another port, or 0 for no metrics"
            ) from error


def _metrics_ports(config: Config) -> Sequence[int]:
    first = config.server.metrics.port
    return range(first, first + config.server.grpc.gateways) if first else ()


def _metrics_addresses(config: Config) -> str:
    """One per gateway; the first also has the numbers of the whole server."""
    host = _reachable(config.server.metrics.host)
    return ", ".join(f"http://{host}:{port}/metrics" for port in _metrics_ports(config))


def _machine() -> Machine:
    return Machine(
        node=socket.gethostname(),
        num_cores=len(os.sched_getaffinity(0)),
        num_gpus=count_gpus(),
        has_cuda_kernels=(Path(airside.__file__).parent / "_kernels_cuda.so").exists(),
        packed_cache=cache_folder() / "packed",
    )
