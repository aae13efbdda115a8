"""The Ray actors: each is one Airside process, and runs in its main thread what `python -m airside.X` runs.

An actor has nothing to say: Ray starts it, tells when it has ended, and kills it. Work and answers travel over the bus,
and it is asked to end by SIGTERM, as without Ray. Being in the main thread is what makes signals work there.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any, ClassVar

from airside.cluster.environment import set_openmp_threads
from airside.proto.settings import (
    ControllerSettings,
    GatewaySettings,
    Settings,
    VisionWorkerSettings,
    WorkerSettings,
)


class CheckpointMissing(RuntimeError):
    """A node has no checkpoint where the others have it; the message names node, path and remedy."""


class LastError:
    """Keeps in one line the last error that this process logged, for whoever asks why it has ended."""

    def __init__(self) -> None:
        self.line = ""
        self._make_record = logging.getLogRecordFactory()
        logging.setLogRecordFactory(self._make_and_keep)

    def _make_and_keep(self, *args: Any, **kwargs: Any) -> logging.LogRecord:  # Any: the signature is logging's
        record = self._make_record(*args, **kwargs)
        if record.levelno >= logging.ERROR:
            error = record.exc_info[1] if record.exc_info else None
            said = record.getMessage() if error is None else f"{type(error).__name__}: {error}"
            self.line = " ".join(said.split())
        return record


class ProcessActor:
    """Base: `run` is called once, after `place`, and blocks until the process has done its work.

    Args:
        settings: JSON of the process's settings.
        num_threads: for OpenMP; Ray sets 1.
    """

    module: ClassVar[str]

    def __init__(self, settings: str, num_threads: int) -> None:
        self._settings = settings
        set_openmp_threads(num_threads)

    def place(self) -> tuple[int, str]:
        """The process's id, and its node's in Ray. That there is an answer means that Ray found room for it."""
        return os.getpid(), _node_id()

    def run(self) -> tuple[int, str]:
        """Runs the process; returns its exit status and, when that is not 0, the last error it logged."""
        last_error = LastError()
        status = self._run()
        return status, last_error.line if status else ""

    def _run(self) -> int:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # a Ray of our own was started with it blocked
        entry = importlib.import_module(f"{self.module}.__main__")
        sys.argv = [self.module, "--settings", self._choose_settings()]
        try:
            return int(entry.main() or 0)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)

    def _choose_settings(self) -> str:
        return self._settings


class ControllerActor(ProcessActor):
    """The controller."""

    module = "airside.controller"


class GatewayActor(ProcessActor):
    """A gateway."""

    module = "airside.controller.gateway"


class WorkerActor(ProcessActor):
    """A rank of the model."""

    module = "airside.workers"


class VisionWorkerActor(ProcessActor):
    """A vision worker, on the ranks' node or on any other.

    Args:
        home: Ray's id of the ranks' node; empty: there are no others.
        settings_elsewhere: JSON of the settings for all others.
    """

    module = "airside.vision_workers"

    def __init__(self, settings: str, num_threads: int, home: str = "", settings_elsewhere: str = "") -> None:
        super().__init__(settings, num_threads)
        self._home = home
        self._settings_elsewhere = settings_elsewhere

    def _choose_settings(self) -> str:
        if not self._home or _node_id() == self._home:
            return self._settings
        settings = VisionWorkerSettings.from_json(self._settings_elsewhere)
        node = _node_name()
        if not Path(settings.model_path).exists():
            raise CheckpointMissing(
                f"node {node} has no {settings.model_path} (model.source): it must be at the same path on every node "
                "that vision workers run on, as on a shared file system; or set cluster.placement to STRICT_PACK"
            )
        return dataclasses.replace(settings, node=node).to_json()


def _node_id() -> str:
    """Ray's id of the node that this process is on."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def _node_name() -> str:
    """The name that Ray was given for this node, or else its host name."""
    import ray

    nodes: Any = ray.nodes()  # Any: untyped
    node = next(node for node in nodes if node["NodeID"] == _node_id())
    is_named = node["NodeName"] != node["NodeManagerAddress"]
    return str(node["NodeName"] if is_named else node["NodeManagerHostname"])


ACTOR_OF: dict[type[Settings], type[ProcessActor]] = {
    ControllerSettings: ControllerActor,
    GatewaySettings: GatewayActor,
    WorkerSettings: WorkerActor,
    VisionWorkerSettings: VisionWorkerActor,
}
"""Which actor runs a process with these settings."""
