"""`airside down`: ends servers, and removes what those have left that were killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import psutil

from airside.cluster.leftovers import clean_run
from airside.cluster.run_state import RunStates, ServerState, ServerUnclear
from airside.cluster.startup_progress import Tell

_CLEANUP_S = 25.0  # beside the time for running requests: processes, Ray, files
_KILL_S = 5.0


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
    process = psutil.Process(server.pid)
    os.kill(server.pid, signal.SIGTERM)
    try:
        process.wait(server.shutdown_timeout_s + _CLEANUP_S)
    except psutil.TimeoutExpired:
        tell("it takes too long; killing it")
        process.kill()
        process.wait(_KILL_S)
