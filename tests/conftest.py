"""For all tests: threads that do not spin, and a last look at what was left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Reference models compute beside the servers under test. OpenMP threads that spin while they wait would take the
# cores from them; this must be said before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import psutil
import pytest

from airside.vision_workers.segment import sweep


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--matrix", action="store_true", help="all combinations where a selection is the rule")
    parser.addoption("--kernels", metavar="FILE", help="in this process, a library in place of the installed kernels")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--kernels")
    if path is not None:
        use_kernels(path)


def use_kernels(path: str) -> None:
    """This library is under test. Each weight gets memory of its own, so that reading past its end is noticed."""
    import torch
    import tvm_ffi

    from airside.workers import ops

    class Apart:
        def take(self, num_bytes: int) -> torch.Tensor:
            return torch.empty(num_bytes, dtype=torch.uint8)

    library = tvm_ffi.load_module(path)
    ops._library = lambda _: library
    ops._weight_memory = Apart()


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    sweep("airside-")  # what earlier runs left is not this one's fault
    yield
    left = sweep("airside-")  # segments whose owner is gone: servers beside the tests keep theirs
    assert not left, f"shared memory left behind: {left}"
    children = [child for child in psutil.Process().children(recursive=True) if _is_ours(child)]
    assert not children, f"processes left behind: {[child.cmdline() for child in children]}"


def _is_ours(process: psutil.Process) -> bool:
    try:
        return any("airside" in word for word in process.cmdline())
    except psutil.Error:
        return False
