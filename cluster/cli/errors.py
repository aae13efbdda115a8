"""What the command line says about an error, and the exit code it ends with. Imports what is loaded already, only."""

from __future__ import annotations

import sys

FAILURE = 1
BAD_INPUT = 2

_KNOWN: dict[tuple[str, str], int] = {
    ("airside.cluster.config.file", "ConfigError"): BAD_INPUT,
    ("airside.cluster.model_source", "ModelSourceError"): BAD_INPUT,
    ("airside.cluster.launch_plan", "LaunchError"): BAD_INPUT,
    ("airside.workers.model_config", "CheckpointError"): BAD_INPUT,
    ("airside.cluster.runs.run_state", "ServerUnclear"): BAD_INPUT,
    ("airside.cluster.runs.run_state", "RunStateError"): FAILURE,
    ("airside.cluster.runs.up", "CannotStart"): FAILURE,
    ("airside.cluster.bench.lone_rank", "NotMeasurable"): BAD_INPUT,
    ("airside.cluster.bench.plot", "PlotUnavailable"): BAD_INPUT,
    ("airside.cluster.bench.streams", "TargetError"): FAILURE,
    ("airside.cluster.supervisor.ray_cluster", "ClusterError"): FAILURE,
    ("airside.cluster.supervisor.supervisor", "StartFailed"): FAILURE,
    ("airside.cluster.supervisor.supervisor", "GaveUp"): FAILURE,
}
"""Errors that are the user's to understand, by module and class: the module of one that was raised is loaded."""

_BAD_INPUT_STATUSES = {"INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "OUT_OF_RANGE", "FAILED_PRECONDITION"}


def explain(error: Exception) -> tuple[str, int] | None:
    """The text for stderr and the exit code; None for an error that is a bug."""
    for (module, name), code in _KNOWN.items():
        known = getattr(sys.modules.get(module), name, None)
        if known is not None and isinstance(error, known):
            return str(error), code
    grpc = sys.modules.get("grpc")
    if grpc is not None and isinstance(error, grpc.RpcError) and isinstance(error, grpc.Call):
        status = error.code().name
        code = BAD_INPUT if status in _BAD_INPUT_STATUSES else FAILURE
        if "failed to connect" in (error.details() or ""):
            return "UNAVAILABLE: no server answers; start one with `airside up FILE`, or say --address HOST:PORT", code
        return f"{status}: {error.details()}", code
    return None
