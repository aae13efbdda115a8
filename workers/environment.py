"""The one file here that touches environment variables: they reach libraries that read nothing else."""

from __future__ import annotations

import os

_LOOPBACK = ("file:", "tcp://127.0.0.1:", "tcp://localhost:")


def prepare_torch(rendezvous: str) -> None:
    """Sets what torch's libraries read when they are loaded, unless the user has; must run before torch is imported.

    Args:
        rendezvous: where the ranks meet, as in WorkerSettings.
    """
    # Waiting OpenMP threads spin, by default for milliseconds. On cores that are shared with the other processes, the
    # thread that has work then waits for those that have none: a decode step took several times as long. So short a
    # spin costs a few per cent on idle cores, where not spinning at all costs half as much again.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if rendezvous.startswith(_LOOPBACK):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
