"""What a worker process shares with torch's libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from airside.workers.environment import prepare_torch

LIST_OPENMP = """
import torch
from airside.workers import ops
ops.rms_norm(torch.ones(1, 8), torch.ones(8), 1e-5)
print(*{line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line}, sep="\\n")
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux lists what a process has loaded")
def test_torch_and_the_kernels_share_one_openmp() -> None:
    """In a process of its own: other packages that a test may load bring one for themselves."""
    done = subprocess.run([sys.executable, "-c", LIST_OPENMP], capture_output=True, text=True, timeout=60, check=True)
    assert len(done.stdout.split()) == 1, done.stdout


@pytest.mark.parametrize(
    ("rendezvous", "interface"),
    [("file:///tmp/x", "lo"), ("tcp://127.0.0.1:99", "lo"), ("tcp://10.1.2.3:99", None), ("", None)],
)
def test_ranks_of_one_machine_meet_on_loopback(
    rendezvous: str, interface: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    prepare_torch(rendezvous)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == interface
    assert "GOMP_SPINCOUNT" in os.environ
    assert int(os.environ["RUST_MIN_STACK"]) > 4 << 20, "the stack of whoever tries a grammar first"


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {"GLOO_SOCKET_IFNAME": "eth7", "GOMP_SPINCOUNT": "5", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "9"}
    monkeypatch.setattr(os, "environ", {**chosen})
    prepare_torch("file:///tmp/x")
    assert {name: os.environ[name] for name in chosen} == chosen
    assert os.environ["LRU_CACHE_CAPACITY"].isdigit()
