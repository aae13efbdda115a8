"""The Ray actors: each is one Airside process, and runs in its main thread what `python -m airside.X` runs.

An actor has nothing to say: Ray starts it, tells when it has ended, and kills it. Work and answers travel over the bus,
and it is asked to end by SIGTERM, as without Ray. Being in the main thread is what makes signals work there.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
from typing import Any, ClassVar

from airside.cluster.environment import set_openmp_threads
from airside.proto.settings import (
    ControllerSettings,
    GatewaySettings,
    Settings,
    VisionWorkerSettings,
    WorkerSettings,
)


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
    """Base: `run` is called once, after `pid`, and blocks until the process has done its work.

    Args:
        settings: JSON of the process's settings.
        num_threads: for OpenMP; Ray sets 1.
    """

    module: ClassVar[str]

    def __init__(self, settings: str, num_threads: int) -> None:
        self._settings = settings
        set_openmp_threads(num_threads)

    def pid(self) -> int:
        """The process's id. That there is an answer means that Ray found room for it."""
        return os.getpid()

    def run(self) -> tuple[int, str]:
        """Runs the process; returns its exit status and, when that is not 0, the last error it logged."""
        last_error = LastError()
        status = self._run()
        return status, last_error.line if status else ""

    def _run(self) -> int:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # a Ray of our own was started with it blocked
        entry = importlib.import_module(f"{self.module}.__main__")
        sys.argv = [self.module, "--settings", self._settings]
        try:
            return int(entry.main() or 0)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)


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
    """A vision worker."""

    module = "airside.vision_workers"


ACTOR_OF: dict[type[Settings], type[ProcessActor]] = {
    ControllerSettings: ControllerActor,
    GatewaySettings: GatewayActor,
    WorkerSettings: WorkerActor,
    VisionWorkerSettings: VisionWorkerActor,
}
"""Which actor runs a process with these settings."""
