"""From a JPEG's bytes to the tensors of a vision tower, beside transformers: `python benchmarks/image_throughput.py`.

Both sides take turns on one core with the same files, their tensors are compared bit for bit, and the table shows
medians of processor time: what a quiet core would take. The pictures are made here: smooth shapes with the spectrum of
photographs, and a sensor's grain, which costs a decoder most of its time.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from smolvlm import write_settings
from transformers import AutoImageProcessor

from airside.cluster.model_source import resolve
from airside.vision_workers.decode import decode
from airside.vision_workers.families.registry import load_family
from airside.vision_workers.header import ImageLimits

LIMITS = ImageLimits(max_bytes=20 << 20, max_pixels=64_000_000, max_aspect=200.0)
SIZES = [(4000, 3000), (1024, 768)]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of processor time of one picture."""

    decode_s: float
    process_s: float


Side = Callable[[bytes], tuple[Timing, dict[str, NDArray[Any]]]]  # Any: each tensor has its own dtype


def main() -> None:
    """Measures and prints. Raises AssertionError when the two sides' tensors differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    demo = resolve("demo", print)
    with tempfile.TemporaryDirectory() as folder:
        smolvlm = write_settings(demo, Path(folder))
        print("| configuration | picture | | decode, ms | process, ms | both, ms | ratio |")
        print("|---|---|---|---:|---:|---:|---:|")
        for name, checkpoint in (("SmolVLM: 2048, tiles of 512", smolvlm), ("demo: 128, one tile", demo)):
            for width, height in SIZES:
                print_rows(f"| {name} | {width}x{height}", compare(checkpoint, photo(width, height), rounds))


def photo(width: int, height: int) -> bytes:
    """A JPEG of quality 88 with its colour at half resolution, as cameras make it: about 2.2 bits per pixel."""
    random = np.random.default_rng(width)
    light = np.full((height, width, 3), 128.0, dtype=np.float32)
    detail, contrast = 2, 60.0
    while detail <= width:
        small = random.standard_normal((max(2, detail * height // width), detail, 3)).astype(np.float32)
        small = 0.4 * small + 1.2 * small.mean(axis=2, keepdims=True)
        for colour in range(3):
            plane = Image.fromarray(small[:, :, colour]).resize((width, height), Image.Resampling.BICUBIC)
            light[:, :, colour] += contrast * np.asarray(plane)
        detail, contrast = 2 * detail, 0.62 * contrast
    light += random.normal(0, 7, (height, width, 1))
    file = io.BytesIO()
    Image.fromarray(light.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=88)
    return file.getvalue()


def compare(checkpoint: Path, data: bytes, rounds: int) -> dict[str, list[Timing]]:
    """Timings by side, after one unmeasured turn each."""
    sides = {"transformers": transformers_side(checkpoint), "airside": airside_side(checkpoint)}
    timings: dict[str, list[Timing]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        tensors = {}
        for name, side in sides.items():
            timing, tensors[name] = side(data)
            if number > 0:
                timings[name].append(timing)
        expect_same(tensors["airside"], tensors["transformers"])
    return timings


def airside_side(checkpoint: Path) -> Side:
    """What a vision worker does."""
    family = load_family(str(checkpoint))

    def prepare(data: bytes) -> tuple[Timing, dict[str, NDArray[Any]]]:
        began = time.process_time()
        image = decode(data, LIMITS, "#ffffff")
        decoded = time.process_time()
        tensors = family.process(image)
        return Timing(decoded - began, time.process_time() - decoded), tensors

    return prepare


def transformers_side(checkpoint: Path) -> Side:
    """The checkpoint's image processor, on what Pillow decodes."""
    processor = AutoImageProcessor.from_pretrained(checkpoint, backend="pil", local_files_only=True)

    def prepare(data: bytes) -> tuple[Timing, dict[str, NDArray[Any]]]:
        began = time.process_time()
        image = Image.open(io.BytesIO(data))
        image.load()
        decoded = time.process_time()
        made = processor([[image]], return_tensors="np")
        timing = Timing(decoded - began, time.process_time() - decoded)
        return timing, {name: made[name][0] for name in ("pixel_values", "pixel_attention_mask")}

    return prepare


def expect_same(made: dict[str, NDArray[Any]], expected: dict[str, NDArray[Any]]) -> None:
    """Raises AssertionError unless all tensors are equal bit for bit."""
    for name, tensor in expected.items():
        assert np.array_equal(made[name], tensor), f"{name} differs from the reference's"


def print_rows(name: str, timings: dict[str, list[Timing]]) -> None:
    """A row of the table per side."""
    totals = {}
    for side, measured in timings.items():
        decode_ms = 1e3 * statistics.median(timing.decode_s for timing in measured)
        process_ms = 1e3 * statistics.median(timing.process_s for timing in measured)
        totals[side] = 1e3 * statistics.median(timing.decode_s + timing.process_s for timing in measured)
        ratio = totals["transformers"] / totals[side]
        print(f"{name} | {side} | {decode_ms:.1f} | {process_ms:.1f} | {totals[side]:.1f} | {ratio:.1f} |")


if __name__ == "__main__":
    main()
