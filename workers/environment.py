"""The one file here that touches environment variables: they reach libraries that read nothing else."""

from __future__ import annotations

import os

_PRODUCTS_KEPT = 256
_STACK_BYTES = 16 * 1024 * 1024
_LOOPBACK = ("file:", "tcp://127.0.0.1:", "tcp://localhost:")


def prepare_torch(rendezvous: str) -> None:
    """Sets what torch's libraries read when they are loaded, unless the user has; must run before torch is imported.

    Args:
        rendezvous: where the ranks meet, as in WorkerSettings.
    """
    # OpenMP threads that wait between two steps spin, by default for milliseconds, and take cores that other processes
    # want. Within a step they wait in a loop of their own (csrc/kernels/cpu/team.cpp).
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # oneDNN and torch each keep the code generated for up to 1024 shapes. Of ours, only vision towers go there.
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(cache, str(_PRODUCTS_KEPT))
    # The threads that compute masks follow a grammar's nesting as deeply as the gateway's child could, and further.
    os.environ.setdefault("RUST_MIN_STACK", str(_STACK_BYTES))
    if rendezvous.startswith(_LOOPBACK):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
