"""`airside down`: ends servers, and removes what those have left that were killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from airside.cluster.runs.leftovers import clean_run
from airside.cluster.runs.run_state import RunStates, ServerState, ServerUnclear
from airside.cluster.runs.startup_progress import Tell

_CLEANUP_S = 25.0  # beside the time for running requests: processes, Ray, files
_KILL_S = 5.0
_LOOK_EVERY_S = 0.05


def choose_servers(states: RunStates, port: int | None, every: bool) -> list[ServerState]:
    """The servers that are meant. Raises ServerUnclear."""
    found = states.all()
    if port is not None:
        found = [state for state in found if state.port == port]
    if not found and not every:
        raise ServerUnclear(f"no server of yours is on port {port}" if port is not None else "no server of yours is up")
    if len(found) > 1 and not every:
        ports = ", ".join(str(state.port) for state in found)
        raise ServerUnclear(f"servers are up on ports {ports}; say --port or --all")
    return found


def down(states: RunStates, servers: Sequence[ServerState], tell: Tell) -> None:
    """Ends servers, one after the other: in order first, by force when that takes too long."""
    for server in servers:
        if server.is_alive:
            _end(server, tell)
        else:
            tell(f"the server on port {server.port} is gone already; cleaning up after it")
        clean_run(states, server)
        tell(f"port {server.port}: stopped")


def _end(server: ServerState, tell: Tell) -> None:
    tell(f"stopping the server on port {server.port}, process {server.pid}")
    os.kill(server.pid, signal.SIGTERM)
    if not _has_ended(server, server.shutdown_timeout_s + _CLEANUP_S):
        tell("it takes too long; killing it")
        os.kill(server.pid, signal.SIGKILL)
        _has_ended(server, _KILL_S)


def _has_ended(server: ServerState, timeout_s: float) -> bool:
    """Waits for the end. A zombie has ended: its parent may never ask for it."""
    until = time.monotonic() + timeout_s
    while server.is_alive:
        if time.monotonic() > until:
            return False
        time.sleep(_LOOK_EVERY_S)
    return True
