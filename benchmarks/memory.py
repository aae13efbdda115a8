"""Peak resident memory of every process of a served demo model: `python benchmarks/memory.py`.

Starts `airside up cluster/local.yaml`, asks it about texts and pictures at once, prints a markdown table, stops it.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from airside.cluster.bench.memory import peak_rss_bytes
from airside.cluster.client import Client, user_message
from airside.cluster.demo_model.exhibits import exhibits
from airside.cluster.sampling_params import SamplingParams

CONFIG = Path(__file__).resolve().parent.parent / "cluster" / "local.yaml"
AIRSIDE = (sys.executable, "-m", "airside.cluster.cli")
NUM_TEXTS = 16
SAMPLING = SamplingParams(max_tokens=128)


def main() -> int:
    """Prints the table; 0 unless the server did not come up."""
    subprocess.run([*AIRSIDE, "up", str(CONFIG), "--detach"], check=True, stdout=sys.stderr)
    try:
        with Client() as client:
            ask(client)
            print(table(processes(client)))
    finally:
        subprocess.run([*AIRSIDE, "down"], check=True, stdout=sys.stderr)
    return 0


def ask(client: Client) -> None:
    """Texts and pictures, all at once."""
    texts = [[user_message(f"Write a few sentences about the number {number}.")] for number in range(NUM_TEXTS)]
    pictures = [[user_message(exhibit.question, exhibit.pictures)] for exhibit in exhibits()]
    with ThreadPoolExecutor(len(texts) + len(pictures)) as pool:
        list(pool.map(lambda messages: list(client.chat(messages, SAMPLING)), texts + pictures))


def processes(client: Client) -> dict[str, list[int]]:
    """Pids by what they are for."""
    workers = client.list_workers().workers
    rows = {worker.name: [worker.pid] for worker in workers}
    supervisor = next(worker.pid for worker in workers if worker.role == "supervisor")
    ours = {worker.pid for worker in workers}
    rays = [child.pid for child in psutil.Process(supervisor).children(recursive=True) if child.pid not in ours]
    return {**rows, f"Ray's own processes ({len(rays)})": rays}


def table(rows: dict[str, list[int]]) -> str:
    """Markdown."""
    peaks = {name: sum(peak_rss_bytes(pid) for pid in pids) / 2**20 for name, pids in rows.items()}
    lines = [f"| {name} | {peak:.0f} MiB |" for name, peak in peaks.items()]
    return "\n".join(["| process | peak resident memory |", "|---|---:|", *lines])


if __name__ == "__main__":
    sys.exit(main())
