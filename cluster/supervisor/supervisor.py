"""Starts, watches, restarts and scales the processes of one run. It never sees a request.

Its loop: hear the controller, notice who has ended, keep the vision pool at its target, say that it is alive.

    gateway ends        the controller is told, and it starts again
    a rank ends         the other ranks cannot go on: all are killed and start again, as the next group
    a vision worker     the controller is told, another one starts, unless it was to go
    the controller ends requests are lost with it: all but the gateways start again
    one of them hangs   the controller says so; it is killed, and has ended
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable

import psutil
import zmq

from airside.cluster.launch_plan import LaunchPlan
from airside.cluster.runs.stop_signal import StopSignal
from airside.cluster.supervisor.ray_cluster import RayCluster, Tell
from airside.cluster.supervisor.ray_process import Placement, RayProcess, wait_ended
from airside.cluster.supervisor.vision_pool import VisionPool
from airside.proto.channel import Link
from airside.proto.messages import (
    Heartbeat,
    Message,
    PeerLost,
    PeerStuck,
    Shutdown,
    SupervisorHello,
    VisionJoined,
    VisionLoad,
    VisionTarget,
)
from airside.vision_workers.segment import sweep

NAME = "supervisor"
TURN_S = 0.2
RESTARTS_MAX = 3
"""Failures of one process, or of the worker group, in a row before the server gives up."""

PROVEN_S = 30.0
"""A process that ran this long before it ended was no failed restart."""

_HEARTBEAT_S = 1.0
_GATEWAY_END_S = 2.0  # beside the time for running calls
_LOOK_S = 0.01  # for processes that are about to be gone
_STOP_S = 5.0  # for controller, ranks and vision workers to end in order


class StartFailed(RuntimeError):
    """A process ended during the start; the message says which and how."""


class GaveUp(RuntimeError):
    """The server cannot go on: a process ends again and again, or Ray is gone. The message says which and how."""


class Supervisor:
    """The processes of one run.

    Args:
        plan: settings of all processes.
        cluster: Ray, with one bundle reserved for the controller, each gateway and each rank, in this order.
        stop: tells when to end.
        tell: shows one line to whoever started the server.
    """

    def __init__(self, plan: LaunchPlan, cluster: RayCluster, stop: StopSignal, tell: Tell) -> None:
        self._plan = plan
        self._cluster = cluster
        self._stop = stop
        self._tell = tell
        self._is_started = False
        self._group = 0
        self._failures: dict[str, int] = {}
        self._last_beat = 0.0
        self._link = Link(plan.run.endpoint, NAME)
        self._controller: RayProcess
        self._gateways: dict[str, RayProcess] = {}
        self._ranks: dict[str, RayProcess] = {}
        self.vision = VisionPool(plan, cluster, self._send, tell)
        self._start_all()

    # --- the loop -------------------------------------------------------------------------------------------------

    def start(self, is_ready: Callable[[], bool], timeout_s: float) -> None:
        """Turns until `is_ready`; from then on processes that end are started again.

        Raises:
            StartFailed: a process ended, or it took too long.
            Stopped: the server was told to stop.
        """
        began = time.monotonic()
        while not is_ready():
            self._stop.check()
            if time.monotonic() - began > timeout_s:
                raise StartFailed(f"not ready after {timeout_s:g} s (cluster.startup_timeout_s)")
            self.turn()
        self._is_started = True

    def serve(self) -> None:
        """Turns until told to stop. Raises GaveUp."""
        while not self._stop.is_requested:
            self.turn()

    def turn(self) -> None:
        """One turn of the loop; takes at most `TURN_S` when nothing happens."""
        self._hear()
        for process in self._all():
            process.look_for_pid()
        for process in wait_ended(self._all(), timeout_s=0):
            self._on_end(process)
        self.vision.keep(time.monotonic())
        self._beat()
        if not self._cluster.is_alive:
            raise GaveUp("Ray has ended, and the processes with it")

    def _hear(self) -> None:
        envelope = self._link.receive(timeout_ms=int(TURN_S * 1000))
        if envelope is None:
            return
        match envelope.message:
            case VisionTarget(replicas, replicas_max):
                self.vision.ask(replicas, replicas_max)
            case VisionLoad():
                self.vision.hear(envelope.message, time.monotonic())
            case VisionJoined(name):
                self.vision.joined(name)
            case PeerStuck(name, pid, why):
                self._end_stuck(name, pid, why)
            case Shutdown(why):  # it took a pause of this process, or of the machine, for its end
                self._tell(f"the controller counted the supervisor as lost ({why}); greeting it again")
                self._greet()
            case other:
                raise TypeError(f"the supervisor was sent {type(other).__name__}")

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._last_beat >= _HEARTBEAT_S:
            self._last_beat = now
            self._send(Heartbeat(psutil.Process().memory_info().rss))

    def _send(self, message: Message) -> None:
        try:
            self._link.send(message)
        except zmq.Again:  # the controller is stuck; it will be restarted when it ends, and greeted anew
            self._tell(f"the controller does not take {type(message).__name__}")

    # --- starts ---------------------------------------------------------------------------------------------------

    def _start_all(self) -> None:
        self._start_ranks()  # first: they take longest, and get the processes that Ray holds ready
        self._controller = self._start_controller()
        self._gateways = {settings.name: self._start_gateway(i) for i, settings in enumerate(self._plan.gateways())}

    def _start_controller(self) -> RayProcess:
        settings = dataclasses.replace(self._plan.controller(), vision_target=self.vision.target)  # survives a restart
        process = RayProcess("controller", settings, Placement(strategy=self._cluster.bundle(0)))
        self._greet()
        return process

    def _greet(self) -> None:
        self._send(SupervisorHello(self._cluster.node, os.getpid()))
        self.vision.report()

    def _start_gateway(self, index: int) -> RayProcess:
        settings = self._plan.gateways()[index]
        return RayProcess(settings.name, settings, Placement(strategy=self._cluster.bundle(1 + index)))

    def _start_ranks(self) -> None:
        first = 1 + len(self._plan.gateways())
        self._ranks = {
            settings.name: RayProcess(
                settings.name,
                settings,
                Placement(
                    num_cpus=1,
                    num_gpus=1 if settings.device == "cuda" else 0,
                    strategy=self._cluster.bundle(first + settings.rank),
                ),
                settings.num_threads,
            )
            for settings in self._plan.workers(self._group)
        }

    # --- ends -----------------------------------------------------------------------------------------------------

    def _all(self) -> list[RayProcess]:
        return [self._controller, *self._gateways.values(), *self._ranks.values(), *self.vision.processes]

    def _on_end(self, process: RayProcess) -> None:
        """Tells the controller, and starts again what has to be there. During the start, an end is a failure."""
        if process not in self._all():
            return  # ended together with the one that was handled before
        _, how = process.end()
        process.kill()  # `run` has returned, but the actor's own process is still there
        if self.vision.owns(process):
            self._on_vision_end(process, how)
            return
        if not self._is_started:
            raise StartFailed(f"{process.name} ended while the server was starting: {how}; its log is above")
        self._count_failure(process, how)
        self._tell(f"{process.name} ended: {how}; starting it again")
        if process is self._controller:
            self._replace_controller()
        elif process.name in self._gateways:
            self._send(PeerLost(process.name, how))
            self._gateways[process.name] = self._start_gateway(list(self._gateways).index(process.name))
        else:
            self._restart_ranks(process.name, how)

    def _end_stuck(self, name: str, pid: int, why: str) -> None:
        """Kills a process that the controller has given up, so that its end is noticed and seen to like any other."""
        for process in self._all():
            if process.name == name and process.kill_stuck(pid, why):
                self._tell(f"{name} (process {pid}) hangs: {why}; it is ended")

    def _on_vision_end(self, process: RayProcess, how: str) -> None:
        if self.vision.ended(process, how, time.monotonic()):
            return
        self._send(PeerLost(process.name, how))
        self._tell(f"{process.name} ended: {how}; another one takes its place")
        if not self._is_started and self.vision.failures >= RESTARTS_MAX:
            raise StartFailed(f"vision workers do not start: {how}")

    def _count_failure(self, process: RayProcess, how: str) -> None:
        """Raises GaveUp when this process, or the group it belongs to, has failed too often in a row."""
        what = "the worker group" if process.name in self._ranks else process.name
        if time.monotonic() - process.started_at > PROVEN_S:
            self._failures[what] = 0
        self._failures[what] = self._failures.get(what, 0) + 1
        if self._failures[what] > RESTARTS_MAX:
            raise GaveUp(f"{what} failed {RESTARTS_MAX + 1} times in a row, last {process.name}: {how}")

    def _restart_ranks(self, name: str, how: str) -> None:
        for process in self._ranks.values():
            process.kill()
            self._send(PeerLost(process.name, how if process.name == name else f"{name} ended: {how}"))
        wait_all(self._ranks.values(), _STOP_S)
        self._group += 1
        self._start_ranks()

    def _replace_controller(self) -> None:
        """Its requests are gone. Gateways stay: they end their streams, with a reason, and greet the new one."""
        others = [*self._ranks.values(), *self.vision.processes]
        for process in others:
            process.kill()
        wait_all(others, _STOP_S)
        sweep(self._plan.run.segment_prefix)  # the controller that would have removed them is gone
        self.vision.clear()
        self._group += 1
        self._link.close()
        self._link = Link(self._plan.run.endpoint, NAME)
        self._controller = self._start_controller()
        self._start_ranks()

    # --- the end --------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> None:
        """Ends all processes: gateways first, whose calls may finish within `timeout_s`, then the others."""
        if not self._cluster.is_alive:
            self._link.close()
            return
        gateways = list(self._gateways.values())
        others = [process for process in self._all() if process not in gateways]
        for process in gateways:
            process.terminate()
        self._wait(gateways, timeout_s + _GATEWAY_END_S if self._is_started else _GATEWAY_END_S)
        self._send(Shutdown("the server is stopping"))
        for process in others:
            if process is not self._controller:
                process.terminate()
        self._wait(others, _STOP_S)
        late = [process for process in self._all() if process.pid is not None and not process.has_ended]
        for process in self._all():
            process.kill()
        wait_all(late, _STOP_S)  # who sweeps up after the run must not come too early
        self._link.close()

    def _wait(self, processes: list[RayProcess], timeout_s: float) -> None:
        """Waits until all have ended, the time is up, or the operator is impatient; stays on the bus meanwhile."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until and not self._stop.is_urgent:
            processes = [process for process in processes if not process.has_ended]
            if not processes:
                return
            wait_ended(processes, TURN_S)
            self._beat()


def wait_all(processes: Iterable[RayProcess], timeout_s: float) -> None:
    """Waits until all that were killed are gone, with what they held, or the time is up."""
    until = time.monotonic() + timeout_s
    there = alive = list(processes)
    while alive and (left_s := until - time.monotonic()) > 0:
        wait_ended(alive, left_s)
        alive = [process for process in alive if not process.has_ended]
    while not all(process.is_gone for process in there) and time.monotonic() < until:
        time.sleep(_LOOK_S)
