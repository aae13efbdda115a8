"""Real vision worker processes: what they serve, and what is left of them however they end."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from airside.proto.messages import Credit, Job, Pixels, Probe, Shape, Shutdown, VisionHello
from airside.proto.settings import VisionWorkerSettings
from airside.vision_workers.decode import decode
from airside.vision_workers.families.registry import load_family
from airside.vision_workers.header import ImageLimits
from airside.vision_workers.segment import sweep

pytestmark = pytest.mark.slow

SHM = Path("/dev/shm")
PICTURE = Path(__file__).parent / "images" / "exif_orient_6.jpg"
SEGMENT = f"airside-vtest-{os.getpid()}-process"
LIMITS = ImageLimits(max_bytes=1 << 20, max_pixels=1_000_000, max_aspect=200.0)


def command(endpoint: str, model_path: Path, segment_bytes: int = 64 << 20, **changes: bool) -> list[str]:
    settings = VisionWorkerSettings(
        endpoint=endpoint,
        name="vision-0",
        model_path=str(model_path),
        segment=SEGMENT,
        segment_bytes=segment_bytes,
        max_bytes=LIMITS.max_bytes,
        max_pixels=LIMITS.max_pixels,
        max_aspect=LIMITS.max_aspect,
        **changes,
    )
    return [sys.executable, "-m", "airside.vision_workers", "--settings", settings.to_json()]


@contextlib.contextmanager
def started(
    endpoint: str, model_path: Path, segment_bytes: int = 64 << 20, **changes: bool
) -> Iterator[subprocess.Popen[str]]:
    words = command(endpoint, model_path, segment_bytes, **changes)
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
            process.communicate()
            sweep(SEGMENT)


def test_serves_and_leaves_a_segment_to_sweep_when_killed(
    endpoint: str, script: Any, splitting_checkpoint: Path
) -> None:
    data = PICTURE.read_bytes()
    with started(endpoint, splitting_checkpoint) as process:
        hello = script.greet()
        assert (hello.pid, hello.segment) == (process.pid, SEGMENT)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) > os.getpriority(os.PRIO_PROCESS, 0)
        script.send(Probe(seq_id=1, image_index=0, epoch=1), data)
        family = load_family(str(splitting_checkpoint))
        shape = np.frombuffer(script.expect(Shape).expansion, "<i4")
        assert np.array_equal(shape, family.shape(64, 96).expansion)
        script.send(Job(seq_id=1, image_index=0, epoch=1), data)
        ref = script.expect(Pixels).pixels
        expected = family.process(decode(data, LIMITS, "#ffffff"))
        assert {tensor.name for tensor in ref.tensors} == {"pixel_values", "pixel_attention_mask"}
        for tensor in ref.tensors:
            made = np.memmap(SHM / SEGMENT, tensor.dtype, "r", ref.slab + tensor.offset, tuple(tensor.shape))
            assert np.array_equal(made, expected[tensor.name])
        script.expect(Credit)

        assert sweep(SEGMENT) == []
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        assert (SHM / SEGMENT).exists()
        assert sweep(SEGMENT) == [SEGMENT]


def test_an_arena_is_no_larger_than_the_machines_shared_memory(
    endpoint: str, script: Any, single_tile_checkpoint: Path
) -> None:
    there = os.statvfs(SHM)
    num_bytes = there.f_blocks * there.f_frsize
    with started(endpoint, single_tile_checkpoint, 2 * num_bytes) as process:
        hello = script.expect(VisionHello)
        assert num_bytes - 2 * mmap.PAGESIZE < hello.segment_bytes < num_bytes
        process.terminate()
        _, said = process.communicate(timeout=60)
    assert f"vision.arena has {2 * num_bytes} bytes, /dev/shm only {num_bytes}" in said


def test_without_shared_memory_it_sends_its_pixels_and_leaves_nothing(
    endpoint: str, script: Any, single_tile_checkpoint: Path
) -> None:
    """Also when it is killed. Neither is it bound by the size of /dev/shm."""
    data, num_bytes = PICTURE.read_bytes(), 1 << 50
    with started(endpoint, single_tile_checkpoint, num_bytes, shares_memory=False) as process:
        hello = script.greet()
        assert (hello.segment, hello.segment_bytes, hello.shares_memory) == (SEGMENT, num_bytes, False)
        script.send(Job(seq_id=1, image_index=0, epoch=1), data)
        pixels, (frame,) = script.next_with_files()
        assert not (SHM / SEGMENT).exists()
        process.kill()
        process.wait(60)
        assert not (SHM / SEGMENT).exists()
    expected = load_family(str(single_tile_checkpoint)).process(decode(data, LIMITS, "#ffffff"))
    assert {tensor.name for tensor in pixels.pixels.tensors} == expected.keys()
    for tensor in pixels.pixels.tensors:
        raw = frame[tensor.offset : tensor.offset + expected[tensor.name].nbytes]
        assert np.array_equal(np.frombuffer(raw, tensor.dtype).reshape(tensor.shape), expected[tensor.name])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, None])
def test_ends_cleanly_when_told(
    endpoint: str, script: Any, single_tile_checkpoint: Path, number: signal.Signals | None
) -> None:
    with started(endpoint, single_tile_checkpoint) as process:
        script.greet()
        if number is None:
            script.send(Shutdown(why="the run is over"))
        else:
            process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors
        assert not (SHM / SEGMENT).exists()


def test_ends_with_the_process_that_started_it(endpoint: str, script: Any, single_tile_checkpoint: Path) -> None:
    start_and_wait = "import subprocess, sys; subprocess.Popen(sys.argv[1:]); sys.stdin.read()"
    parent = [sys.executable, "-c", start_and_wait, *command(endpoint, single_tile_checkpoint)]
    with subprocess.Popen(parent, stdin=subprocess.PIPE) as process:
        worker = os.pidfd_open(script.greet().pid)
        try:
            process.kill()
            process.wait(60)
            assert select.select([worker], [], [], 60)[0], "the orphan goes on"
        finally:
            os.close(worker)
    assert not (SHM / SEGMENT).exists()


def test_refuses_a_text_model(endpoint: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    done = subprocess.run(command(endpoint, tmp_path), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "text-only" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_vision_worker_loads_no_torch() -> None:
    code = (
        "import json, sys\n"
        "from airside.vision_workers.__main__ import _do_without_torch\n"
        "_do_without_torch()\n"
        "from airside.vision_workers.families import idefics3\n"
        "print(json.dumps([name for name, module in sys.modules.items() if module and name.startswith('torch')]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(result.stdout) == []
    assert result.stderr == ""
