"""`airside up --detach`: the same server in a process of its own, whose output goes to a file."""

from __future__ import annotations

import subprocess
import sys
import time

from airside.cluster.runs.run_state import RunStates, ServerState
from airside.cluster.runs.startup_progress import Tell
from airside.cluster.runs.up import CannotStart

_LOOK_EVERY_S = 0.1


def start_detached(arguments: list[str], port: int, states: RunStates, tell: Tell) -> ServerState | None:
    """Starts `airside up` with these arguments and returns once it is ready, or None when it has ended instead.

    Its output is shown while it starts, and kept in the log file of its port. Interrupted, it ends the server again.

    Raises:
        CannotStart: a server of this user is up on that port; its log is not touched.
    """
    other = states.read(port)
    if other is not None and other.is_alive:
        raise CannotStart(f"server.grpc.port: {other.address} is taken: {other.remedy}")
    log_file = states.log_file(port)
    with log_file.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "airside.cluster.cli", "up", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        with log_file.open(errors="replace") as shown:
            while True:
                ended = child.poll() is not None
                for line in shown:
                    tell(line.rstrip("\n"))
                ready = next((state for state in states.all() if state.pid == child.pid and state.is_ready), None)
                if ready is not None:
                    log_file.replace(states.log_file(ready.port))  # it chose one when it was told to take any, 0
                if ready is not None or ended:
                    return ready
                time.sleep(_LOOK_EVERY_S)
    except KeyboardInterrupt:
        child.terminate()
        child.wait()
        raise
