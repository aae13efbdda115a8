"""State files and what a killed server leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from airside.cluster.runs.detached import start_detached
from airside.cluster.runs.down import choose_servers, down
from airside.cluster.runs.leftovers import clean_dead_runs, processes_of
from airside.cluster.runs.run_state import (
    BASE_LENGTH_MAX,
    RunStateError,
    RunStates,
    ServerState,
    ServerUnclear,
    choose_base,
)
from airside.cluster.runs.up import CannotStart


def state(states: RunStates, port: int, pid: int | None = None, started_at: float | None = None) -> ServerState:
    run = states.new_run()
    owner = psutil.Process(pid)
    made = ServerState(
        port=port,
        address=f"127.0.0.1:{port}",
        pid=owner.pid,
        process_started_at=owner.create_time() if started_at is None else started_at,
        run_id=run.run_id,
        run_dir=str(run.directory),
        config_file="a.yaml",
        shutdown_timeout_s=5.0,
    )
    states.write(made)
    return made


def wait_for_line(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    assert child.stdout.readline() == "up\n"


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)
    wait_for_line(child)
    return child


def test_a_state_is_read_back_and_directories_are_private(tmp_path: Path) -> None:
    states = RunStates(tmp_path / "base")
    written = state(states, 50051)
    assert states.read(50051) == written
    assert written.is_alive
    assert Path(written.run_dir).stat().st_mode & 0o777 == 0o700
    assert states.base.stat().st_mode & 0o777 == 0o700


def test_a_base_that_cannot_be_made_is_said_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    states = RunStates(tmp_path / "file" / "airside")
    for use in (states.new_run, lambda: states.log_file(50051)):
        with pytest.raises(
            RunStateError, match=r"file/airside cannot be used \(Not a directory\); set XDG_RUNTIME_DIR"
        ):
            use()


def test_a_reused_pid_is_not_the_server(tmp_path: Path) -> None:
    states = RunStates(tmp_path / "base")
    assert not state(states, 50051, os.getpid(), started_at=1.0).is_alive


def test_dead_runs_are_cleaned_and_living_ones_stay(tmp_path: Path) -> None:
    states = RunStates(tmp_path / "base")
    living, dead = state(states, 1001), state(states, 1002, started_at=1.0)
    segment = Path("/dev/shm") / f"airside-{dead.run_id}-vision-0"
    segment.write_bytes(b"AIRSIDE1" + (2**22 + 1).to_bytes(8, "little") + (1).to_bytes(8, "little"))
    try:
        assert clean_dead_runs(states) == [dead]
        assert not segment.exists()
    finally:
        segment.unlink(missing_ok=True)
    assert states.all() == [living]
    assert Path(living.run_dir).exists()
    assert not Path(dead.run_dir).exists()


def test_a_second_detached_server_leaves_the_log_of_the_first_alone(tmp_path: Path) -> None:
    states = RunStates(tmp_path / "base")
    first = state(states, 1001)
    states.log_file(1001).write_text("ready\n")
    with pytest.raises(CannotStart, match=f"process {first.pid} runs; `airside down --port 1001` ends it"):
        start_detached(["a.yaml"], 1001, states, print)
    assert states.log_file(1001).read_text() == "ready\n"


def test_a_state_file_of_another_run_on_the_port_is_not_removed(tmp_path: Path) -> None:
    states = RunStates(tmp_path / "base")
    old, new = state(states, 1001), state(states, 1001)
    states.remove(old)
    assert states.read(1001) == new


def test_a_damaged_state_file_counts_as_none(tmp_path: Path) -> None:
    states = RunStates(tmp_path)
    (tmp_path / "1001.json").write_text("{")
    (tmp_path / "1002.json").write_text('{"port": 1002}')
    assert states.all() == []


def test_only_processes_that_work_in_the_directory_are_found(tmp_path: Path) -> None:
    directory = tmp_path / "0a1b2c3d"
    directory.mkdir()
    code = (
        "import sys, time; f = open(sys.argv[1], 'w') if sys.argv[1:] else 0; print('up', flush=True); time.sleep(60)"
    )
    named, other = python(code, str(directory / "log")), python(code)
    retitled = subprocess.Popen(  # as Ray's processes are: only the open file tells
        [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE,
        stderr=(directory / "err").open("w"),
        text=True,
    )
    wait_for_line(retitled)
    try:
        assert {process.pid for process in processes_of(directory)} == {named.pid, retitled.pid}
    finally:
        for child in (named, other, retitled):
            child.kill()
            child.communicate()


def test_down_ends_the_server_in_order(tmp_path: Path) -> None:
    code = "import signal, sys; signal.signal(15, lambda *_: sys.exit(0)); print('up', flush=True); signal.pause()"
    child = python(code)
    states = RunStates(tmp_path / "base")
    server = state(states, 1001, child.pid)
    lines: list[str] = []
    down(states, choose_servers(states, None, every=False), lines.append)
    assert child.wait() == 0
    assert states.all() == []
    assert not Path(server.run_dir).exists()
    assert lines[-1] == "port 1001: stopped"


def test_down_does_not_wait_for_a_zombie(tmp_path: Path) -> None:
    server_code = "import signal, sys; signal.signal(15, lambda *_: sys.exit(0)); print(0, flush=True); signal.pause()"
    parent_code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); print(child.pid, flush=True); sys.stdin.read()"  # it never asks how the child ended
    )
    command = [sys.executable, "-c", parent_code, server_code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        states = RunStates(tmp_path / "base")
        server = state(states, 1001, int(parent.stdout.readline()))
        lines: list[str] = []
        down(states, [server], lines.append)
        assert psutil.Process(server.pid).status() == psutil.STATUS_ZOMBIE
    assert lines[-1] == "port 1001: stopped"
    assert "it takes too long; killing it" not in lines


def test_down_cleans_up_after_a_killed_server(tmp_path: Path) -> None:
    states = RunStates(tmp_path / "base")
    child = python("import time; print('up', flush=True); time.sleep(60)")
    server = state(states, 1001, child.pid)
    leftover = python("import time; print('up', flush=True); time.sleep(60)", f"{server.run_dir}/x")
    child.kill()
    child.communicate()
    down(states, [server], lambda _line: None)
    assert leftover.poll() is not None
    assert leftover.stdout is not None
    leftover.stdout.close()


def test_down_does_not_guess(tmp_path: Path) -> None:
    states = RunStates(tmp_path / "base")
    with pytest.raises(ServerUnclear, match="no server of yours is up"):
        choose_servers(states, None, every=False)
    first, second = state(states, 1001), state(states, 1002)
    with pytest.raises(ServerUnclear, match="ports 1001, 1002; say --port or --all"):
        choose_servers(states, None, every=False)
    assert choose_servers(states, 1002, every=False) == [second]
    assert choose_servers(states, None, every=True) == [first, second]
    with pytest.raises(ServerUnclear, match="on port 7"):
        choose_servers(states, 7, every=False)


def test_the_base_directory_leaves_room_for_socket_names() -> None:
    assert choose_base(Path("/run/user/1000"), Path("/home/a")) == Path("/run/user/1000/airside")
    assert choose_base(None, Path("/home/a")) == Path("/home/a/.cache/airside/run")
    assert len(str(choose_base(None, Path("/home/" + "a" * 60)))) <= BASE_LENGTH_MAX
