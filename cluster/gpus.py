"""The GPUs of this machine, without torch, which would take a second and 140 MB to say."""

from __future__ import annotations

from pathlib import Path

_DRIVERS_FOLDER = Path("/proc/driver/nvidia/gpus")


def count_gpus() -> int:
    """How many GPUs NVIDIA's driver has found."""
    return sum(1 for _ in _DRIVERS_FOLDER.glob("*"))
