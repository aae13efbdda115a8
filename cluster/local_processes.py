"""Starts Airside's processes as plain children of this one, without Ray: for the offline `LLM` and for tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from airside.proto.settings import (
    ControllerSettings,
    GatewaySettings,
    Settings,
    VisionWorkerSettings,
    WorkerSettings,
)

_MODULES: dict[type[Settings], str] = {
    ControllerSettings: "airside.controller",
    GatewaySettings: "airside.controller.gateway",
    VisionWorkerSettings: "airside.vision_workers",
    WorkerSettings: "airside.workers",
}

_END_WITH_PARENT = """
import ctypes, os, runpy, signal, sys
_, parent, module, *arguments = sys.argv
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if os.getppid() != int(parent):
    sys.exit("the process that started this one is gone")
sys.argv = [module, *arguments]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
"""What a child runs. Asking for the signal before it is a program of its own would take a fork, and in a fork of a
process that uses gRPC, gRPC's own handlers fail."""


class LocalProcesses:
    """A set of child processes and the private run directory they share (logs, ipc sockets).

    Children end with this process, even when it is killed; more exactly, with the thread that started them.
    """

    def __init__(self) -> None:
        self.run_dir = Path(tempfile.mkdtemp(prefix="airside-"))
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def endpoint(self) -> str:
        """Where the controller of this set binds its bus."""
        return f"ipc://{self.run_dir}/bus"

    def start(self, name: str, settings: Settings) -> int:
        """Starts the process that these settings are for, under a name of its own; returns its pid."""
        if name in self._children:
            raise ValueError(f"a process named {name} is running already")
        module = _MODULES[type(settings)]
        with (self.run_dir / f"{name}.log").open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, "-c", _END_WITH_PARENT, str(os.getpid()), module, "--settings", settings.to_json()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for this process, which then stops its children in order. A session of its own for each
                # would do that too, but Linux shares processors out evenly among sessions, whatever their priorities.
                process_group=0,
            )
        self._children[name] = child
        return child.pid

    def pid(self, name: str) -> int:
        """The pid of a started process."""
        return self._children[name].pid

    def exited(self) -> dict[str, int]:
        """Names and exit codes of the processes that have ended by themselves."""
        codes = {name: child.poll() for name, child in self._children.items()}
        return {name: code for name, code in codes.items() if code is not None}

    def wait(self, name: str, timeout_s: float) -> int:
        """Waits for one process to end and returns its exit code. Raises subprocess.TimeoutExpired."""
        return self._children[name].wait(timeout_s)

    def log(self, name: str) -> str:
        """What a process has printed so far."""
        return (self.run_dir / f"{name}.log").read_text(errors="replace")

    def stop(self, timeout_s: float = 10.0) -> None:
        """Asks all to end, the controller last among equals, kills those that have not after `timeout_s`, cleans up."""
        for child in self._children.values():
            if child.poll() is None:
                child.terminate()
        for child in self._children.values():
            try:
                child.wait(timeout_s)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._children.clear()
        shutil.rmtree(self.run_dir, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
