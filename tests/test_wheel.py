"""The built wheel alone: everything that the checkout has and a user needs is in it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

PROBE = """
import airside, sys
from importlib.metadata import entry_points, version
from pathlib import Path
import torch
from airside import LLM, SamplingParams, _core
from airside.cluster.bench import kernels, offline, serve, step
from airside.cluster.cli import program
from airside.cluster.demo_model.exhibits import exhibits
from airside.proto import airside_pb2_grpc
from airside.workers import ops
from airside.workers.linear import make_linear

root = Path(airside.__file__).parent
assert str(root).startswith(sys.argv[1]), root
assert len(exhibits()) > 10
assert (root / "cluster" / "demo_model" / "assets" / "vision_connector.safetensors").is_file()
assert (root / "cluster" / "demo_model" / "assets" / "text_adapter.safetensors").is_file()
assert (root / "cluster" / "local.yaml").is_file()
assert (root / "proto" / "airside.proto").is_file()
assert ops.silu_and_mul(torch.zeros(1, 4)).shape == (1, 2)
assert make_linear(torch.ones(3, 2))(torch.ones(1, 2)).tolist() == [[2.0, 2.0, 2.0]]
assert _core.EngineConfig is not None
print(version("airside"))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)  # it compiles everything, on a machine that may have other work
def test_a_wheel_has_all_that_is_needed(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = ["wheel", "--no-build-isolation", "--no-deps", "-w", str(tmp_path), "-C", f"build-dir={tmp_path}/build"]
    subprocess.run([*pip, *build, str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("airside-*.whl")
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    # -S keeps the editable installation's import hook out; what Airside depends on comes from this environment.
    paths = os.pathsep.join([str(site), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    probe = subprocess.run(
        [sys.executable, "-S", "-c", PROBE, str(site)],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert probe.returncode == 0, probe.stderr
    assert probe.stdout.strip() == "0.1.0"
