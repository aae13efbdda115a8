"""`python -m airside.workers --settings JSON`: one rank of the model."""

from __future__ import annotations

import argparse
import logging
import os
import sys

from airside.proto.settings import WorkerSettings
from airside.workers.environment import prepare_torch
from airside.workers.weights.load_times import LoadTimes


def main() -> int:
    """Runs a worker until it is told to stop; returns its exit status."""
    parent_pid = os.getppid()
    parser = argparse.ArgumentParser(prog="airside.workers", description="One rank of the model.")
    parser.add_argument("--settings", required=True, help="WorkerSettings as JSON")
    settings = WorkerSettings.from_json(parser.parse_args().settings)
    logging.basicConfig(
        level=settings.log_level.upper(),
        format=f"%(asctime)s %(levelname)s {settings.name} %(message)s",
        stream=sys.stderr,
    )
    prepare_torch(settings.rendezvous)
    times = LoadTimes()
    with times.phase("import"):
        from airside.workers.worker import run_worker  # torch takes a second; bad settings should not

    return run_worker(settings, parent_pid, times)


if __name__ == "__main__":
    sys.exit(main())
