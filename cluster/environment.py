"""The one file that touches environment variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

_RAY_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
# Ray's own 15 would leave almost no room below, and vision workers are to run below the ranks.
_RAY_NICENESS = {"RAY_worker_niceness": "0"}
_RAY_PLAIN = {"RAY_COLOR_PREFIX": "0"}  # log files are no terminals
# The name is historical: with 0, Ray takes 127.0.0.1 for this node's address and listens there only.
_RAY_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def variables() -> Mapping[str, str]:
    """All environment variables, for `config_file.load_config`."""
    return os.environ


def runtime_dir() -> Path | None:
    """The user's private runtime directory, when the system has one."""
    value = os.environ.get("XDG_RUNTIME_DIR")
    return Path(value) if value else None


def cache_folder() -> Path:
    """Where Airside keeps what it can make again: `$XDG_CACHE_HOME/airside`, or under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "airside"


def visible_gpus() -> list[str] | None:
    """What `CUDA_VISIBLE_DEVICES` names, up to the first that is none; None: it is not set, so all."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    names = [name.strip() for name in value.split(",")]
    return names[: next((i for i, name in enumerate(names) if not name or name.startswith("-")), len(names))]


def prepare_ray(*, local: bool) -> None:
    """Sets what Ray reads when it is imported. Values that the user has set stay."""
    values = _RAY_QUIET | _RAY_NICENESS | (_RAY_LOOPBACK if local else {}) | ({} if sys.stdout.isatty() else _RAY_PLAIN)
    for name, value in values.items():
        os.environ.setdefault(name, value)


def set_openmp_threads(num_threads: int) -> None:
    """For libraries that are not loaded yet; overrides Ray, which sets 1."""
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
