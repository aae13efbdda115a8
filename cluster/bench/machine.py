"""The machine: what it is, and the two limits that every model meets, how fast it reads and how fast it multiplies."""

from __future__ import annotations

import multiprocessing
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_READ_BYTES = 512 * 2**20  # many times what any cache holds
_PRODUCT_SIZE = 1536
_SECONDS_EACH = 1.0


@dataclass(frozen=True, slots=True)
class Limits:
    """The best of many tries."""

    read_bytes_per_s: float
    flop_per_s: float
    """Of matrix products in the dtype that was asked for; a multiplication and an addition count as two."""

    def least_seconds(self, num_bytes: float, num_flop: float) -> float:
        """What so much reading and so much arithmetic takes at the least, if both go on at once."""
        return max(num_bytes / self.read_bytes_per_s, num_flop / self.flop_per_s)

    def best(self, other: Limits) -> Limits:
        """The better of two measurements in each: a limit that was passed was none."""
        return Limits(
            max(self.read_bytes_per_s, other.read_bytes_per_s),
            max(self.flop_per_s, other.flop_per_s),
        )


def measure_limits(dtype: str, seconds_each: float = _SECONDS_EACH) -> Limits:
    """Measures in this process, on all its threads.

    Args:
        dtype: torch's name of it, "bfloat16".
    """
    import torch

    read = torch.ones(_READ_BYTES // 8, dtype=torch.int64)
    x = torch.randn(_PRODUCT_SIZE, _PRODUCT_SIZE).to(getattr(torch, dtype))
    out = torch.empty_like(x)
    return Limits(
        _READ_BYTES / _least_seconds(lambda: read.max(), seconds_each),
        2 * _PRODUCT_SIZE**3 / _least_seconds(lambda: torch.mm(x, x, out=out), seconds_each),
    )


def measure_limits_apart(dtype: str, seconds_each: float = _SECONDS_EACH) -> Limits:
    """The same in a process of its own, for one that does not want the memory it takes."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure_on_all_cores, dtype, seconds_each).result()


def _measure_on_all_cores(dtype: str, seconds_each: float) -> Limits:
    import torch

    torch.set_num_threads(num_cores())
    return measure_limits(dtype, seconds_each)


def _least_seconds(call: Callable[[], object], seconds: float) -> float:
    call()
    until = time.perf_counter() + seconds
    least = float("inf")
    while (began := time.perf_counter()) < until:
        call()
        least = min(least, time.perf_counter() - began)
    return least


def num_cores() -> int:
    """As Airside counts them."""
    return os.cpu_count() or 1


def cpu_name() -> str:
    """As Linux calls it, with the number of cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()
