"""Where this user's servers are written down."""

from __future__ import annotations

from pathlib import Path

from airside.cluster.environment import runtime_dir
from airside.cluster.runs.run_state import RunStates, choose_base


def server_states() -> RunStates:
    """The state files of this user. Raises RunStateError."""
    return RunStates(choose_base(runtime_dir(), Path.home()))
