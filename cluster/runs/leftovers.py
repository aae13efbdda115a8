"""What a run may leave when its supervisor was killed: processes, shared memory, files. Finds and removes it.

A process is a run's own when it is this user's, is this Python or one of Ray's programs, and its command line or one
of its open files names the run's private directory, whose name is random. Ray retitles its processes, so that a command
line alone would not do; their logs are in the directory.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from airside.cluster.runs.run_state import RunStates, ServerState
from airside.vision_workers.segment import sweep

_END_TIMEOUT_S = 5.0
_PROGRAMS = {Path(sys.executable).resolve().name, "raylet", "gcs_server"}
_NEW_S = 60.0  # a directory this young may belong to a supervisor that has not written its state file yet


def processes_of(directory: Path) -> list[psutil.Process]:
    """This user's processes that work in a run's private directory, except the calling one and its ancestors."""
    me = psutil.Process()
    spared = {me.pid, *(parent.pid for parent in me.parents())}
    return [
        process
        for process in psutil.process_iter()
        if process.pid not in spared and _works_in(process, f"{directory}/", me.uids().real)
    ]


def _works_in(process: psutil.Process, directory: str, uid: int) -> bool:
    try:
        if process.uids().real != uid or Path(process.exe()).name not in _PROGRAMS:
            return False
        if any(directory in argument for argument in process.cmdline()):
            return True
        return any(file.path.startswith(directory) for file in process.open_files())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def end_processes(processes: Iterable[psutil.Process]) -> int:
    """Terminates processes, kills those that do not end in five seconds; how many there were."""
    alive = list(processes)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, stubborn = psutil.wait_procs(alive, timeout=_END_TIMEOUT_S)
    for process in stubborn:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(stubborn, timeout=_END_TIMEOUT_S)
    return len(alive)


def clean_run(states: RunStates, state: ServerState) -> None:
    """Removes everything a run has left. The supervisor must be gone."""
    end_processes(processes_of(Path(state.run_dir)))
    sweep(state.run.segment_prefix)
    states.remove(state)


def clean_dead_runs(states: RunStates) -> list[ServerState]:
    """Cleans up after every supervisor that is gone; returns their states."""
    dead = [state for state in states.all() if not state.is_alive]
    for state in dead:
        clean_run(states, state)
    for directory in states.abandoned_dirs():
        if time.time() - directory.stat().st_mtime > _NEW_S and not processes_of(directory):
            shutil.rmtree(directory, ignore_errors=True)
    return dead
