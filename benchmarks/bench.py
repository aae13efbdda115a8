"""Airside beside transformers on one machine, in one interleaved run: `python benchmarks/bench.py [--quick]`.

Prints a markdown table and writes the same figures, with every single measurement, to bench-results/.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

from sides import AirsideSide, Prompts, Side, TransformersSide

from airside.cluster.model_source import resolve

RESULTS = Path(__file__).resolve().parent.parent / "bench-results"
ORDINARY_TOKEN_IDS = range(1000, 40_000)  # no special tokens among them


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    prompt_tokens: int = 128
    output_tokens: int = 128
    num_requests: int = 32
    num_alone: int = 4  # of those, how many transformers computes one at a time; a rate needs no more
    num_running: tuple[int, ...] = (64, 256)  # sequences while the controller's step is timed
    repeats: int = 5


QUICK = Size(prompt_tokens=32, output_tokens=16, num_requests=8, num_alone=2, num_running=(16,), repeats=1)


@dataclass(slots=True)
class Figures:
    """Measurements by the name of the figure, then by side; the table shows their medians."""

    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, figure: str, side: str, value: float) -> None:
        """One more measurement."""
        self.samples.setdefault(figure, {}).setdefault(side, []).append(value)

    def median(self, figure: str, side: str) -> float | None:
        """None when that side has no such figure."""
        values = self.samples[figure].get(side)
        return statistics.median(values) if values else None


FIRST_TOKEN = "one request: time to first token, ms"
DECODE = "one request: decode, tokens/s"
TOGETHER = "all requests at once, output tokens/s"
ALONE = "the same, transformers one at a time, output tokens/s"
STEP = "controller's work per step of {} sequences, µs"


def main() -> int:
    """Measures, prints, writes; 0 unless something could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small and once: does it run, not how fast")
    parser.add_argument("--model", default="demo", help='"demo", a folder or a Hugging Face id')
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else Size()
    checkpoint = resolve(arguments.model, tell)
    figures = Figures()
    memory = compare(checkpoint, size, figures)
    for num_running in size.num_running:
        time_controller(checkpoint, num_running, figures)
    print(table(figures, size))
    print(memory_table(memory))
    tell(f"written to {write(figures, memory, size, arguments.model)}")
    return 0


def tell(line: str) -> None:
    """Progress, beside the table and not in it."""
    print(line, file=sys.stderr, flush=True)


def compare(checkpoint: Path, size: Size, figures: Figures) -> dict[str, int]:
    """Runs both sides in turn, `repeats` times; returns the peak memory of every process."""
    tell("loading Airside and transformers")
    airside = AirsideSide(checkpoint)
    try:
        transformers = TransformersSide(checkpoint)
        try:
            for side in (airside, transformers):
                side.generate(prompts(1, size, seed=-1), size.output_tokens)  # warm up
            for repeat in range(size.repeats):
                tell(f"round {repeat + 1} of {size.repeats}")
                measure_round(airside, transformers, size, figures, seed=repeat)
            return airside.peak_rss_bytes() | transformers.peak_rss_bytes()
        finally:
            transformers.close()
    finally:
        airside.close()


def measure_round(airside: Side, transformers: Side, size: Size, figures: Figures, seed: int) -> None:
    """Every figure once for each side, the sides side by side in time and taking turns at going first."""
    order = (airside, transformers) if seed % 2 == 0 else (transformers, airside)
    one, many = prompts(1, size, seed), prompts(size.num_requests, size, seed)
    for side in order:
        first = side.generate(one, 1)
        whole = side.generate(one, size.output_tokens)
        figures.add(FIRST_TOKEN, side.name, first * 1e3)
        figures.add(DECODE, side.name, (size.output_tokens - 1) / (whole - first))
    for side in order:
        if side is airside or seed == 0:  # a static batch takes transformers a minute; once is enough to place it
            seconds = side.generate(many, size.output_tokens)
            figures.add(TOGETHER, side.name, size.num_requests * size.output_tokens / seconds)
    seconds = sum(transformers.generate([prompt], size.output_tokens) for prompt in many[: size.num_alone])
    figures.add(ALONE, transformers.name, size.num_alone * size.output_tokens / seconds)


def time_controller(checkpoint: Path, num_running: int, figures: Figures) -> None:
    """In an engine of its own, so that nearly all steps in the median have `num_running` sequences."""
    tell(f"the controller's step at {num_running} sequences")
    airside = AirsideSide(checkpoint, max_num_seqs=num_running)
    try:
        short = Size(prompt_tokens=16)
        airside.generate(prompts(num_running, short, seed=-2), num_tokens=64)
        figures.add(STEP.format(num_running), airside.name, airside.controller_step_s() * 1e6)
    finally:
        airside.close()


def prompts(count: int, size: Size, seed: int) -> Prompts:
    """Different prompts of one length, the same for both sides; made up, since speed does not depend on the words."""
    chosen = random.Random(seed)
    return [chosen.choices(ORDINARY_TOKEN_IDS, k=size.prompt_tokens) for _ in range(count)]


def table(figures: Figures, size: Size) -> str:
    """Markdown; the ratio says how many times better Airside is."""
    lines = [
        f"{size.prompt_tokens} prompt and {size.output_tokens} output tokens, greedy, bfloat16; "
        f"median of {size.repeats}; {size.num_requests} requests at once (transformers' static batch: one run).\n",
        "| | Airside | transformers | ratio |",
        "|---|---:|---:|---:|",
    ]
    steps = [STEP.format(num_running) for num_running in size.num_running]
    for figure in (FIRST_TOKEN, DECODE, TOGETHER, ALONE, *steps):
        ours, theirs = figures.median(figure, AirsideSide.name), figures.median(figure, TransformersSide.name)
        if figure == ALONE:
            ours = figures.median(TOGETHER, AirsideSide.name)
        lines.append(f"| {figure} | {_number(ours)} | {_number(theirs)} | {_ratio(figure, ours, theirs)} |")
    return "\n".join(lines) + "\n"


def memory_table(memory: dict[str, int]) -> str:
    """Markdown; what each process had resident at its peak."""
    rows = [f"| {name} | {peak / 2**20:.0f} MiB |" for name, peak in memory.items()]
    return "\n".join(["| process | peak resident memory |", "|---|---:|", *rows]) + "\n"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


def _ratio(figure: str, ours: float | None, theirs: float | None) -> str:
    if ours is None or theirs is None:
        return ""
    return f"{theirs / ours if figure == FIRST_TOKEN else ours / theirs:.2f}"


def write(figures: Figures, memory: dict[str, int], size: Size, model: str) -> Path:
    """One JSON file per run, named by its time."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"bench-{time.strftime('%Y%m%d-%H%M%S')}.json"
    content = {
        "model": model,
        "command": " ".join(sys.argv),
        "size": asdict(size),
        "machine": {"cpu": cpu_name(), "system": platform.platform(), "python": platform.python_version()},
        "versions": {name: version(name) for name in ("airside", "torch", "transformers")},
        "samples": figures.samples,
        "peak_rss_bytes": memory,
    }
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return path


def cpu_name() -> str:
    """As Linux calls it, with the number of cores this process may use."""
    info = Path("/proc/cpuinfo").read_text()
    names = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


if __name__ == "__main__":
    sys.exit(main())
