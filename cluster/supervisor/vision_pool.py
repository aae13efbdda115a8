"""The vision workers of a run: as many as `Autoscaler` wants, started and ended as `VisionScaling` decides.

It says why there are too few.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from airside.cluster.launch_plan import LaunchPlan
from airside.cluster.supervisor.autoscaler import Autoscaler, Bounds
from airside.cluster.supervisor.ray_cluster import RayCluster, Tell
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
        tell: shows one line to whoever started the server.
    """

    def __init__(self, plan: LaunchPlan, cluster: RayCluster, send: Callable[[msg.Message], None], tell: Tell) -> None:
        self._plan = plan
        self._cluster = cluster
        self._send = send
        self._tell = tell
        vision = plan.config.vision
        rules = vision.autoscaling_config
        bounds = Bounds(plan.vision_replicas, rules.max_replicas if plan.takes_images else 0)
        self._autoscaler = Autoscaler(rules, bounds)
        self._scaling = VisionScaling(plan.vision_replicas, rules.max_replicas)
        self._scale_events: Counter[str] = Counter()
        self._workers: dict[int, RayProcess] = {}
        self._told_drain: dict[int, float] = {}
        self._wanted = {"CPU": vision.actor_options.num_cpus, **vision.actor_options.resources}
        self._next_look = 0.0
        self._pending = ""
        self._reported: msg.VisionPool | None = None

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

    def ask(self, replicas: int, replicas_max: int | None) -> None:
        """Someone asked for exactly so many, or for a range within which the load decides. Tried at once."""
        self._autoscaler.ask(Bounds(replicas, replicas if replicas_max is None else replicas_max))
        self._scaling.retry()
        self._aim("asked")

    def hear(self, load: msg.VisionLoad, now: float) -> None:
        """The controller says how long a picture would wait."""
        self._autoscaler.hear(load, now)
        self._aim("load")

    def joined(self, name: str) -> None:
        """The controller says that this one is up. One that has ended since may be among them."""
        for number, worker in self._workers.items():
            if worker.name == name:
                self._scaling.joined(number)

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
        if self._news() != self._reported:
            self.report()

    def report(self) -> None:
        """Tells the controller how many there should be, and why there are fewer."""
        self._reported = self._news()
        self._send(self._reported)

    def ended(self, process: RayProcess, how: str, now: float) -> bool:
        """Forgets one that has ended; whether it was told to go."""
        number = next(number for number, worker in self._workers.items() if worker is process)
        del self._workers[number]
        self._told_drain.pop(number, None)
        was_draining = self._scaling.is_draining(number)
        self._scaling.ended(number, how, now, process.has_hung)
        return was_draining

    def clear(self) -> None:
        """Forgets all: they were killed with the controller, and what it said of the load. As many start again."""
        for number in self._workers:
            self._scaling.killed(number)
        self._workers.clear()
        self._told_drain.clear()
        self._autoscaler.restart()

    def _aim(self, why: str) -> None:
        before = self._scaling.target
        self._scaling.set_target(self._autoscaler.wanted)
        after = self._scaling.target
        if after != before:
            self._scale_events[f"{'up' if after > before else 'down'}_{why}"] += 1
            self._tell(f"vision_scale from={before} to={after} why={why}")

    def _news(self) -> msg.VisionPool:
        bounds = self._autoscaler.bounds
        events, restarts = dict(self._scale_events), dict(self._scaling.restarts)
        return msg.VisionPool(self._scaling.target, self.pending, bounds.fewest, bounds.most, events, restarts)

    def _start(self, number: int) -> None:
        settings, elsewhere = self._plan.vision_worker(number), self._plan.remote_vision_worker(number)
        self._workers[number] = RayProcess(settings.name, settings, self._placement(), elsewhere=elsewhere)

    def _placement(self) -> Placement:
        options, placement = self._plan.config.vision.actor_options, self._plan.placement
        here = {self._cluster.node_resource: 0.001} if placement == "STRICT_PACK" else {}
        strategy = self._cluster.strategy(placement)
        return Placement(options.num_cpus, 0.0, {**options.resources, **here}, strategy)

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
        missing = self._cluster.missing(self._wanted, self._plan.placement)
        return f"{len(waiting)} pending: {missing}" if missing else ""
