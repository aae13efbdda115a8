"""What pictures do to text, and how vision workers add up: `python benchmarks/vision.py [--quick]`.

Starts `airside up cluster/local.yaml` on a port of its own, prints one markdown table, writes the same figures with
every sample to bench-results/, stops the server.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
from picture_load import PictureLoad, jpeg, page
from smolvlm import write_tiny_model
from text_load import TextTimes, measure_texts

from airside.cluster.bench.machine import cpu_name
from airside.cluster.client import Client
from airside.cluster.model_source import resolve

RESULTS = Path(__file__).resolve().parent.parent / "bench-results"
CONFIG = Path(__file__).resolve().parent.parent / "cluster" / "local.yaml"
AIRSIDE = (sys.executable, "-m", "airside.cluster.cli")
PHOTO = (4000, 3000)  # as telephones take them
PAGE = (2480, 3508)  # A4, 300 dots per inch
CALM_S = 120.0  # for vision workers to come, go and put down what nobody wants any more


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    rounds: int = 3  # of a quiet stretch and one with pictures
    stretch_s: float = 40.0
    num_texts: int = 4  # streams at once
    num_pictures: int = 32  # in flight
    workers: tuple[int, ...] = (1, 2, 4)
    pictures_per_request: int = 4  # where only the workers are to be measured
    workers_beside_text: int = 2
    throughput_s: float = 30.0


QUICK = Size(rounds=1, stretch_s=8.0, workers=(1, 2), throughput_s=8.0)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: what it is compared with, and what it came to."""

    figure: str
    base: float
    measured: float


def main() -> int:
    """Measures, prints, writes; 0 unless something could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small and once: does it run, not how fast")
    size = QUICK if parser.parse_args().quick else Size()
    with server("demo", size.workers_beside_text) as client:
        quiet, loaded, made_per_s = compare_texts(client, size)
    with tempfile.TemporaryDirectory() as folder:
        smolvlm = write_tiny_model(resolve("demo", tell), Path(folder))
        with server(str(smolvlm), max(size.workers)) as client:
            images_per_s = compare_workers(client, size)
    rows = [*text_rows(quiet, loaded), *worker_rows(images_per_s)]
    print(table(rows, size, made_per_s))
    tell(f"written to {write(size, quiet, loaded, made_per_s, images_per_s)}")
    return 0


# --- what is measured -----------------------------------------------------------------------------------------------


def tell(line: str) -> None:
    """Progress, beside the table and not in it."""
    print(line, file=sys.stderr, flush=True)


def compare_texts(client: Client, size: Size) -> tuple[TextTimes, TextTimes, float]:
    """Texts alone and beside pictures, in turns; and how many pictures were made per second meanwhile."""
    set_workers(client, size.workers_beside_text)
    measure_texts(client.address, size.num_texts, size.stretch_s / 4)  # warm up
    quiet, loaded, made, passed_s = TextTimes(), TextTimes(), 0, 0.0
    file = jpeg(*PHOTO)
    for number in range(size.rounds):
        tell(f"round {number + 1} of {size.rounds}: texts alone")
        quiet.add(measure_texts(client.address, size.num_texts, size.stretch_s))
        tell(f"round {number + 1} of {size.rounds}: beside {size.num_pictures} pictures")
        with PictureLoad(client.address, file, size.num_pictures, client.info().image_mark) as load:
            begin, before = time.perf_counter(), load.num_made
            loaded.add(measure_texts(client.address, size.num_texts, size.stretch_s))
            made, passed_s = made + load.num_made - before, passed_s + time.perf_counter() - begin
        wait_until(lambda: is_calm(client), "the vision workers are idle again")
    return quiet, loaded, made / passed_s


def compare_workers(client: Client, size: Size) -> dict[int, float]:
    """Pictures made per second by number of vision workers, at SmolVLM's settings.

    The rank is stopped meanwhile: it would take a share of the processors, as much as there are pictures to look at.
    """
    file, mark = page(*PAGE), client.info().image_mark
    images_per_s: dict[int, float] = {}
    set_workers(client, size.workers[0])  # fewer than now, which takes a rank that runs: it may be reading their pixels
    with stopped(rank_pid(client)):
        for workers in size.workers:
            tell(f"pages with {workers} vision workers")
            with PictureLoad(client.address, file, size.num_pictures, mark, size.pictures_per_request) as load:
                # With pictures under way: a rank that has nothing to compute may not be silent.
                set_workers(client, workers)
                begin, before = time.perf_counter(), load.num_made
                time.sleep(size.throughput_s)
                images_per_s[workers] = (load.num_made - before) / (time.perf_counter() - begin)
    return images_per_s


# --- the server -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def server(model: str, workers_max: int) -> Iterator[Client]:
    """A served model.

    Args:
        model: `model.source` of the configuration.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    overrides = {
        "model.source": model,
        "server.grpc.port": port,
        "server.metrics.port": 0,
        "vision.autoscaling_config.max_replicas": workers_max,
        "vision.arena": "2GiB",  # all that are in flight
        "engine.step_timeout_s": 3600,  # a stopped rank is not to be replaced
        "cluster.silence_timeout_s": 60,
    }
    settings = [word for key, value in overrides.items() for word in ("--set", f"{key}={value}")]
    subprocess.run([*AIRSIDE, "up", str(CONFIG), "--detach", *settings], check=True, stdout=sys.stderr)
    try:
        with contextlib.closing(Client(f"127.0.0.1:{port}")) as client:
            yield client
    finally:
        subprocess.run([*AIRSIDE, "down", "--port", str(port)], check=True, stdout=sys.stderr)


def set_workers(client: Client, count: int) -> None:
    """Exactly so many vision workers, whatever the load; waits for them."""
    client.scale_vision(count)
    wait_until(lambda: vision_states(client).count("draining") == 0 and len(vision_states(client)) == count, "workers")


def vision_states(client: Client) -> list[str]:
    """Of every vision worker that is not lost."""
    workers = client.list_workers(timeout_s=30).workers
    return [row.state for row in workers if row.role == "vision_worker" and row.state != "lost"]


def is_calm(client: Client) -> bool:
    """Whether no vision worker has anything to do."""
    return set(vision_states(client)) == {"ready"} and client.info().gauges.vision_queue_depth == 0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Raises TimeoutError."""
    until = time.monotonic() + CALM_S
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"not within {CALM_S:.0f} s: {what}")
        time.sleep(0.2)


def rank_pid(client: Client) -> int:
    """The process that runs the model."""
    return next(row.pid for row in client.list_workers().workers if row.role == "worker")


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that takes no processor time meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


# --- what is shown --------------------------------------------------------------------------------------------------


def text_rows(quiet: TextTimes, loaded: TextTimes) -> list[Row]:
    """Milliseconds, quiet and loaded. A step that also computes tokens of pictures takes longer whoever made them."""
    kinds = {
        "time to first token": (quiet.first_s, loaded.first_s),
        "time to first token, of steps without pictures": (quiet.first_s, loaded.plain_first_s),
        "gap between tokens": (quiet.gaps_s, loaded.gaps_s),
        "gap between tokens, of steps without pictures": (quiet.gaps_s, loaded.plain_gaps_s),
    }
    return [
        Row(f"{kind}, p{percent}, ms", *(float(np.percentile(samples, percent)) * 1e3 for samples in sides))
        for kind, sides in kinds.items()
        for percent in (50, 99)
        if all(sides)
    ]


def worker_rows(images_per_s: dict[int, float]) -> list[Row]:
    """Images per second, with one vision worker and with more."""
    one = images_per_s[1]
    return [Row(f"{workers} vision workers, pages/s", one, many) for workers, many in images_per_s.items()]


def table(rows: list[Row], size: Size, made_per_s: float) -> str:
    """Markdown. The base is the text alone, or the one vision worker."""
    lines = [
        f"{size.num_texts} streams of text, alone and beside {size.num_pictures} JPEGs of {PHOTO[0]} x {PHOTO[1]} in "
        f"flight, of which {size.workers_beside_text} vision workers made {made_per_s:.2f} per second. Then drawn "
        f"pages, PNGs of {PAGE[0]} x {PAGE[1]}, at SmolVLM's settings, the model stopped.\n",
        "| | base | measured | ratio |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        f"| {row.figure} | {row.base:,.1f} | {row.measured:,.1f} | {row.measured / row.base:.2f} |"
        if row.base
        else f"| {row.figure} | {row.base:,.1f} | {row.measured:,.1f} | |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def write(size: Size, quiet: TextTimes, loaded: TextTimes, made_per_s: float, images_per_s: dict[int, float]) -> Path:
    """One JSON file per run, named by its time."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"vision-{time.strftime('%Y%m%d-%H%M%S')}.json"
    content = {
        "command": " ".join(sys.argv),
        "size": asdict(size),
        "machine": {"cpu": cpu_name(), "system": platform.platform(), "python": platform.python_version()},
        "versions": {name: version(name) for name in ("airside", "torch", "pillow")},
        "quiet": asdict(quiet),
        "loaded": asdict(loaded),
        "pictures_per_s_beside_text": made_per_s,
        "images_per_s": images_per_s,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


if __name__ == "__main__":
    sys.exit(main())
