"""`airside up` as a child process with state files of its own, and what a test asks of it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import yaml

from airside.cluster.client import Client
from airside.cluster.runs.leftovers import processes_of
from airside.cluster.runs.run_state import RunStates, ServerState
from airside.cluster.sampling_params import SamplingParams
from tests.real_processes import free_port, wait_until

START_S = 120.0
PATIENCE_S = 60.0


class Home:
    """A place for state files, and the command line that knows no other servers than those there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.states = RunStates(folder / "airside")
        self.environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}

    def command(self, *arguments: str) -> list[str]:
        """The program and its arguments."""
        return [sys.executable, "-m", "airside.cluster.cli", *arguments]

    def airside(self, *arguments: str, timeout_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end."""
        return subprocess.run(
            self.command(*arguments),
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )

    def write_config(self, model: Path, port: int) -> Path:
        """A small server."""
        config = {
            "model": {"source": str(model)},
            "engine": {"kv_cache_memory": "4MiB", "max_num_seqs": 8, "num_threads": 1},
            "vision": {"actor_options": {"num_cpus": 0.25}, "arena": "16MiB"},
            "server": {"grpc": {"port": port}, "metrics": {"port": 0}, "shutdown_timeout_s": 5},
        }
        path = self.folder / "a.yaml"
        path.write_text(yaml.safe_dump(config))
        return path


@contextmanager
def new_home() -> Iterator[Home]:
    """A home whose path is short: Ray's sockets have to fit under it."""
    folder = Path(tempfile.mkdtemp(prefix="as", dir="/tmp"))
    yield Home(folder)
    shutil.rmtree(folder)


class UpServer:
    """A server that is starting, and how it is seen from outside.

    Args:
        home: where its state files are.
        model: the checkpoint.
        overrides: KEY=VALUE for `--set`.
    """

    def __init__(self, home: Home, model: Path, overrides: Sequence[str] = ()) -> None:
        self.home = home
        self.port = free_port()
        settings = [word for override in overrides for word in ("--set", override)]
        self.log = (home.folder / "log").open("w+")
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            home.command("up", str(home.write_config(model, self.port)), *settings),
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env=home.environment,
            start_new_session=True,
        )
        self.address = f"127.0.0.1:{self.port}"
        self.client = Client(self.address)

    def wait_ready(self) -> ServerState:
        """Until it serves."""

        def ready() -> bool:
            assert self.process.poll() is None, self.text()
            state = self.home.states.read(self.port)
            return state is not None and state.is_ready

        wait_until(ready, START_S, "the server is ready")
        return self.state()

    def state(self) -> ServerState:
        """As its supervisor wrote it down."""
        state = self.home.states.read(self.port)
        assert state is not None
        return state

    def text(self) -> str:
        """All output so far."""
        self.log.seek(0)
        return self.log.read()

    def pids(self, *roles: str) -> set[int]:
        """Of the processes with these roles."""
        rows = self.client.list_workers().workers
        return {row.pid for row in rows if row.role in roles and row.state != "lost"}

    def processes(self) -> list[psutil.Process]:
        """The supervisor and all that it started, Ray's own processes included."""
        supervisor = psutil.Process(self.process.pid)
        return [supervisor, *supervisor.children(recursive=True)]

    def is_ready(self) -> bool:
        """Whether the engine has its workers."""
        return self.client.info().state == "ready"

    def vision_workers(self) -> list[str]:
        """Names of those that take jobs."""
        rows = self.client.list_workers().workers
        return [row.name for row in rows if row.role == "vision_worker" and row.state in ("ready", "busy")]

    def tokens(self) -> list[int]:
        """Of a short greedy answer."""
        params = SamplingParams(max_tokens=6, temperature=0.0)
        events = self.client.generate("The small red", params=params, timeout_s=30)
        return [token for event in events for token in event.delta.token_ids]

    def left(self, state: ServerState) -> list[str]:
        """What is still there of a run: processes, shared memory, files, the port."""
        processes = [str(process.pid) for process in processes_of(Path(state.run_dir))]
        segments = [path.name for path in Path("/dev/shm").glob(f"{state.run.segment_prefix}*")]
        files = [path for path in (state.run_dir, self.home.states.base / f"{self.port}.json") if Path(path).exists()]
        ports = [] if is_free(self.port) else [str(self.port)]
        return [*processes, *segments, *map(str, files), *ports]

    def close(self) -> None:
        """Ends it, however it is."""
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        assert self.home.airside("down", "--all").returncode == 0
        self.log.close()


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that still run. A zombie does not; whoever inherited it will ask for it in time."""
    return [each for each in processes if each.is_running() and not _is_zombie(each)]


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def is_free(port: int) -> bool:
    """Whether a server could listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
