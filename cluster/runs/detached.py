"""`airside up --detach`: the same server in a process of its own, whose output goes to a file."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from airside.cluster.runs.run_state import RunStates, ServerState
from airside.cluster.runs.startup_progress import Tell

_LOOK_EVERY_S = 0.1


def start_detached(arguments: list[str], log_file: Path, states: RunStates, tell: Tell) -> ServerState | None:
    """Starts `airside up` with these arguments and returns once it is ready, or None when it has ended instead.

    Its output is shown while it starts, and kept in `log_file`. Interrupted, it ends the server again.
    """
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
                if ready is not None or ended:
                    return ready
                time.sleep(_LOOK_EVERY_S)
    except KeyboardInterrupt:
        child.terminate()
        child.wait()
        raise
