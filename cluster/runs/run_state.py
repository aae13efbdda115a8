"""What is known on disk about the servers of this user: one state file per port, one private directory per run.

<base>/50051.json      who serves this port: pid, start time, run
<base>/50051.log       output of `airside up --detach`
<base>/<run id>/       mode 0700: the bus socket and, for a Ray of our own, Ray's session
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from airside.cluster.launch_plan import Run

BASE_LENGTH_MAX = 36
"""Longer base directories leave no room for the names of Ray's sockets, which may have 107 bytes in all."""


class RunStateError(RuntimeError):
    """The state directory cannot be used; the message says why."""


class ServerUnclear(RuntimeError):
    """There is no such server, or more than one that could be meant; the message says which there are."""


@dataclass(frozen=True, slots=True)
class ServerState:
    """One server, as its supervisor wrote it down."""

    port: int
    address: str
    pid: int
    process_started_at: float  # tells the pid from its reuse
    run_id: str
    run_dir: str
    config_file: str
    shutdown_timeout_s: float
    is_ready: bool = False

    @property
    def run(self) -> Run:
        """The run that this server is."""
        return Run(self.run_id, Path(self.run_dir))

    @property
    def remedy(self) -> str:
        """What to tell someone who wants its port."""
        return f"by the server that process {self.pid} runs; `airside down --port {self.port}` ends it"

    @property
    def is_alive(self) -> bool:
        """Whether the supervisor still runs."""
        return is_process(self.pid, self.process_started_at)


def is_process(pid: int, started_at: float) -> bool:
    """Whether the process that had this pid and this start time (unix) still runs."""
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - started_at) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class RunStates:
    """The state files under one base directory, which is made on first use."""

    def __init__(self, base: Path) -> None:
        self.base = base

    def new_run(self) -> Run:
        """Makes the private directory of a new run."""
        self._make_base()
        run = Run(secrets.token_hex(4), Path())
        directory = self.base / run.run_id
        directory.mkdir(mode=0o700)
        return dataclasses.replace(run, directory=directory)

    def log_file(self, port: int) -> Path:
        """Where a detached server on this port writes its output."""
        self._make_base()
        return self.base / f"{port}.log"

    def write(self, state: ServerState) -> None:
        """Writes a state file, whole or not at all."""
        self._make_base()
        draft = self.base / f".{state.port}.{state.run_id}"
        draft.write_text(json.dumps(dataclasses.asdict(state)))
        draft.replace(self._file(state.port))

    def remove(self, state: ServerState) -> None:
        """Removes a run's directory, and its state file unless another run has taken the port over."""
        shutil.rmtree(state.run_dir, ignore_errors=True)
        current = self.read(state.port)
        if current is not None and current.run_id == state.run_id:
            self._file(state.port).unlink(missing_ok=True)

    def read(self, port: int) -> ServerState | None:
        """The state file of a port. A file that makes no sense counts as none."""
        return _parse(self._file(port))

    def all(self) -> list[ServerState]:
        """All servers, running and not, by port."""
        states = [_parse(path) for path in self.base.glob("[0-9]*.json")]
        return sorted((state for state in states if state is not None), key=lambda state: state.port)

    def abandoned_dirs(self) -> list[Path]:
        """Run directories that no state file speaks of."""
        known = {Path(state.run_dir) for state in self.all()}
        return [path for path in self.base.glob("*") if path.is_dir() and path not in known]

    def _file(self, port: int) -> Path:
        return self.base / f"{port}.json"

    def _make_base(self) -> None:
        try:
            self.base.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.base.is_symlink() or self.base.lstat().st_uid != os.getuid():
                raise RunStateError(f"{self.base} belongs to somebody else; remove it, or set XDG_RUNTIME_DIR")
            self.base.chmod(0o700)
        except OSError as error:
            why = error.strerror or str(error)
            raise RunStateError(
                f"{self.base} cannot be used ({why}); set XDG_RUNTIME_DIR to a folder of yours"
            ) from error


def choose_base(runtime_dir: Path | None, home: Path) -> Path:
    """The directory for state files: the first short enough of the usual places, so that sockets fit under it."""
    places = [home / ".cache" / "airside" / "run", Path(f"/tmp/airside-{os.getuid()}")]
    if runtime_dir is not None:
        places.insert(0, runtime_dir / "airside")
    return next((place for place in places if len(str(place)) <= BASE_LENGTH_MAX), places[-1])


def _parse(path: Path) -> ServerState | None:
    try:
        return ServerState(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
