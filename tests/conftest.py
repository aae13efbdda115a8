"""For all tests: threads that do not spin, and a last look at what was left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Reference models compute beside the servers under test. OpenMP threads that spin while they wait would take the
# cores from them; this must be said before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import psutil
import pytest


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    segments_before = _segments()
    yield
    left = _segments() - segments_before
    assert not left, f"shared memory left behind: {sorted(left)}"
    children = [child for child in psutil.Process().children(recursive=True) if _is_ours(child)]
    assert not children, f"processes left behind: {[child.cmdline() for child in children]}"


def _segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("airside-*")}


def _is_ours(process: psutil.Process) -> bool:
    try:
        return any("airside" in word for word in process.cmdline())
    except psutil.Error:
        return False
