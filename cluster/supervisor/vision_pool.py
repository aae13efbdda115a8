"""The vision workers of a run: carries out what `VisionScaling` decides, and says why there are too few."""

from __future__ import annotations

from collections.abc import Callable

from airside.cluster.launch_plan import LaunchPlan
from airside.cluster.supervisor.ray_cluster import RayCluster
from airside.cluster.supervisor.ray_process import Placement, RayProcess
from airside.cluster.supervisor.vision_scaling import Drain, Start, VisionScaling
from airside.proto import messages as msg

_DRAIN_AGAIN_S = 1.0  # one that was told to go before it had said hello has to be told again
_LOOK_EVERY_S = 1.0  # for resources that are missing


class VisionPool:
    """All vision workers.

    Args:
        plan: their settings and number at first.
        cluster: where they run; they wait there for resources of their own.
        send: puts a message on the bus to the controller.
    """

    def __init__(self, plan: LaunchPlan, cluster: RayCluster, send: Callable[[msg.Message], None]) -> None:
        self._plan = plan
        self._cluster = cluster
        self._send = send
        vision = plan.config.vision
        self._scaling = VisionScaling(plan.vision_replicas, vision.max_replicas)
        self._workers: dict[int, RayProcess] = {}
        self._told_drain: dict[int, float] = {}
        self._wanted = {"CPU": vision.actor_options.num_cpus, **vision.actor_options.resources}
        self._next_look = 0.0
        self._pending = ""
        self._reported: tuple[int, str] | None = None

    @property
    def processes(self) -> list[RayProcess]:
        """All that have not ended yet."""
        return list(self._workers.values())

    @property
    def pending(self) -> str:
        """Why there are fewer than wanted; empty when there are not."""
        return "; ".join(filter(None, (self._scaling.notice, self._pending)))

    @property
    def target(self) -> int:
        """How many there should be."""
        return self._scaling.target

    @property
    def failures(self) -> int:
        """Vision workers in a row that came to nothing."""
        return self._scaling.failures

    def owns(self, process: RayProcess) -> bool:
        """Whether it is one of these."""
        return process in self._workers.values()

    def set_target(self, replicas: int) -> None:
        """Someone asked for this many."""
        self._scaling.set_target(replicas)

    def keep(self, now: float) -> None:
        """Starts and drains until the pool is at its target; tells the controller when there is news."""
        for step in self._scaling.decide(now):
            match step:
                case Start(number):
                    self._start(number)
                case Drain(number):
                    self._drain(number, now)
        self._drain_again(now)
        if now >= self._next_look:
            self._next_look = now + _LOOK_EVERY_S
            self._pending = self._missing()
        if (self._scaling.target, self.pending) != self._reported:
            self.report()

    def report(self) -> None:
        """Tells the controller how many there should be, and why there are fewer."""
        self._reported = self._scaling.target, self.pending
        self._send(msg.VisionPool(*self._reported))

    def ended(self, process: RayProcess, how: str, now: float) -> bool:
        """Forgets one that has ended; whether it was told to go."""
        number = next(number for number, worker in self._workers.items() if worker is process)
        del self._workers[number]
        self._told_drain.pop(number, None)
        was_draining = self._scaling.is_draining(number)
        self._scaling.ended(number, how, now)
        return was_draining

    def clear(self) -> None:
        """Forgets all: they were killed. As many start again."""
        for number in self._workers:
            self._scaling.killed(number)
        self._workers.clear()
        self._told_drain.clear()

    def _start(self, number: int) -> None:
        options = self._plan.config.vision.actor_options
        placement = Placement(options.num_cpus, 0.0, {**options.resources, self._cluster.node_resource: 0.001})
        settings = self._plan.vision_worker(number)
        self._workers[number] = RayProcess(settings.name, settings, placement)

    def _drain(self, number: int, now: float) -> None:
        worker = self._workers[number]
        worker.look_for_pid()
        if worker.pid is None:
            worker.kill()  # it still waits for resources
            return
        self._told_drain[number] = now
        self._send(msg.DrainVision(worker.name))

    def _drain_again(self, now: float) -> None:
        for number, told_at in list(self._told_drain.items()):
            if now - told_at >= _DRAIN_AGAIN_S:
                self._drain(number, now)

    def _missing(self) -> str:
        waiting = [worker for worker in self._workers.values() if worker.pid is None]
        if not waiting:
            return ""
        missing = self._cluster.missing(self._wanted)
        return f"{len(waiting)} pending: {missing}" if missing else ""
