"""One process of a run as its supervisor sees it: a Ray actor, a pid once it has been placed, and how it ended.

On this node it is sent signals. One on another node is asked to end over the bus, by the controller, and killed by Ray.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil
import ray
import ray.exceptions

from airside.cluster.supervisor.actors import ACTOR_OF
from airside.proto.settings import Settings


@dataclass(frozen=True, slots=True)
class Placement:
    """What Ray reserves for a process, and where."""

    num_cpus: float = 0.0
    num_gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    strategy: Any = "DEFAULT"  # Any: Ray's scheduling strategies have no common type


class RayProcess:
    """Starts an actor for these settings. It may wait for resources; `pid` is None until it runs.

    Args:
        name: of the process, on the bus.
        settings: for a process on this node.
        placement: where it may be.
        num_threads: for OpenMP.
        elsewhere: in place of the settings, where it starts on another node.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        placement: Placement,
        num_threads: int = 1,
        elsewhere: Settings | None = None,
    ) -> None:
        self.name = name
        self.settings = settings
        self.started_at = time.monotonic()
        actor_class: Any = ray.remote(ACTOR_OF[type(settings)])  # Any: Ray's actor classes are untyped, as are handles
        options = actor_class.options(
            num_cpus=placement.num_cpus,
            num_gpus=placement.num_gpus,
            resources=dict(placement.resources),
            scheduling_strategy=placement.strategy,
            max_restarts=0,
        )
        home = ray.get_runtime_context().get_node_id()
        self._actor: Any = (
            options.remote(settings.to_json(), num_threads)
            if elsewhere is None
            else options.remote(settings.to_json(), num_threads, home, elsewhere.to_json())
        )
        self._place_ref = self._actor.place.remote()
        self.run_ref = self._actor.run.remote()
        self._pid: int | None = None
        self._home = home
        self._is_here = True  # until it is known to be elsewhere
        self._killed_why = ""

    @property
    def pid(self) -> int | None:
        """Of the process, once it runs and `look_for_pid` has seen it."""
        return self._pid

    def look_for_pid(self) -> None:
        """Notes the process's id as soon as Ray has placed it: afterwards, nobody can be asked."""
        if self._pid is None and ray.wait([self._place_ref], timeout=0)[0]:
            with contextlib.suppress(ray.exceptions.RayError):
                self._pid, node_id = ray.get(self._place_ref)
                self._is_here = node_id == self._home

    @property
    def has_ended(self) -> bool:
        """Whether `run` has returned, failed, or died with its process."""
        return bool(ray.wait([self.run_ref], timeout=0)[0])

    def end(self) -> tuple[int, str]:
        """Exit status and one line saying how it ended. Only once it has."""
        assert self.has_ended, f"{self.name} still runs"
        if self._killed_why:
            return 1, f"killed, {self._killed_why}"
        try:
            status, why = ray.get(self.run_ref)
            return status, f"exit status {status}: {why}" if why else f"exit status {status}"
        except ray.exceptions.RayTaskError as error:
            return 1, " ".join(str(error.cause).split()) or type(error.cause).__name__
        except ray.exceptions.RayActorError as error:
            return 1, _first_sentence(str(error), self._pid)

    @property
    def is_gone(self) -> bool:
        """Whether no such process runs here any more: one that was killed has ended, for Ray, somewhat earlier."""
        if self._pid is None or not self._is_here:
            return True
        try:
            return psutil.Process(self._pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        except psutil.NoSuchProcess:
            return True

    @property
    def has_hung(self) -> bool:
        """Whether `kill_stuck` has ended it."""
        return bool(self._killed_why)

    def terminate(self) -> None:
        """Asks it to end in order. One that was never placed is taken back; one elsewhere hears of it over the bus."""
        self.look_for_pid()
        if self.pid is None:
            self.kill()
        elif not self.has_ended:
            self._signal(signal.SIGTERM)

    def kill_stuck(self, pid: int, why: str) -> bool:
        """Ends it if this is its pid, and says why when asked how it ended. False: it is another, or has ended."""
        self.look_for_pid()
        if self._pid != pid or self.has_ended:
            return False
        self._killed_why = why
        self.kill()
        return True

    def kill(self) -> None:
        """Ends it now, stopped or hung or not."""
        self.look_for_pid()
        if self.pid is not None and not self.has_ended:
            self._signal(signal.SIGKILL)
        ray.kill(self._actor, no_restart=True)

    def _signal(self, number: signal.Signals) -> None:
        assert self._pid is not None
        if not self._is_here:  # here, the number is another process's
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, number)


def _first_sentence(text: str, pid: int | None) -> str:
    """What is new in Ray's long explanation."""
    who = f"process {pid}" if pid is not None else "the process"
    if "worker process has died" in text:
        return f"{who} was killed or crashed"
    if "its node has died" in text:
        return f"{who} is gone with its node"
    if "is unavailable" in text:  # counts as ended all the same, and is killed if it should still be there
        return f"{who} cannot be reached on its node"
    return f"{who}: {' '.join(text.split())[:200]}"


def wait_ended(processes: Iterable[RayProcess], timeout_s: float) -> list[RayProcess]:
    """Waits until one of the processes has ended, or the time is up; all that have."""
    by_ref = {process.run_ref: process for process in processes}
    if not by_ref:
        return []
    ended, _ = ray.wait(list(by_ref), num_returns=1, timeout=timeout_s, fetch_local=False)
    if ended:
        ended, _ = ray.wait(list(by_ref), num_returns=len(by_ref), timeout=0, fetch_local=False)
    return [by_ref[ref] for ref in ended]
