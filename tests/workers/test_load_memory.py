"""What loading a model takes of memory, at its peak: little more than its packed weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import make_llama
from tests.workers.step_plans import worker_settings

PROGRAM = """
import sys
from pathlib import Path
from airside.proto.settings import WorkerSettings
from airside.workers import worker
from airside.workers.load import load_runner
from airside.workers.parallel import RankGroup
from airside.workers.pixels import PixelArena

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024

settings = WorkerSettings.from_json(sys.argv[1])
before = peak()
runner = load_runner(settings, RankGroup(settings.rank, settings.world_size), PixelArena())
loaded = peak()
runner.allocate(1000)
print(loaded - before, peak() - loaded)
print(sum("model.safetensors" in line for line in Path("/proc/self/maps").read_text().splitlines()))
print("torch._dynamo" in sys.modules, "sympy" in sys.modules, "transformers" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_held_once(tied: bool, tmp_path: Path) -> None:
    path = make_llama(tmp_path / "llama", tied=tied, vocab_size=60_000, hidden_size=512, intermediate_size=2048)
    settings = worker_settings(str(path), dtype="float32")
    command = [sys.executable, "-c", PROGRAM, settings.to_json()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    peaks, maps, modules = done.stdout.splitlines()
    loading, allocating = (int(word) for word in peaks.split())
    weights = (path / "model.safetensors").stat().st_size - (0 if tied else 60_000 * 512 * 4)
    assert weights > 120e6
    # Beside the weights: a buffer, and what is imported on the way. Untied, the embedding stays in the file.
    assert weights * 0.95 < loading < weights + 32e6
    assert allocating < 8e6  # its thousand blocks are not touched
    assert int(maps) == (0 if tied else 1)
    assert modules == "False False False"
