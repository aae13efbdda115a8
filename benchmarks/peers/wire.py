"""A peer's side of the conversation with `compare.py`: one line of JSON asks, one answers.

-> {"prompts": [[id, ...], ...], "num_tokens": n}     computes all prompts together, exactly n tokens for each
<- {"seconds": s, "peak_rss_bytes": b}                b: the largest of the processes that it started and that ended
   {"error": "..."}

`SCRIPT --check` tells by its exit code whether the engine is installed; `SCRIPT --serve PORT` becomes its server.
Standard library only: this runs in every engine's own environment.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
from collections.abc import Callable
from typing import Any

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], float]
Load = Callable[[str, int, dict[str, Any]], Generate]
"""Of a model's path, a number of threads and options: what computes, and returns the seconds it took."""
ServeCommand = Callable[[str, int, int, dict[str, Any]], list[str]]
"""Of the same and a port before the options: the program that serves."""


def main(is_installed: Callable[[], bool], load: Load, serve_command: ServeCommand | None = None) -> None:
    """What a peer's script does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--model", default="")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--serve", type=int)
    arguments = parser.parse_args()
    if arguments.check:
        sys.exit(0 if is_installed() else 1)
    if arguments.serve is not None:
        if serve_command is None:
            sys.exit("this engine has no server")
        command = serve_command(arguments.model, arguments.threads, arguments.serve, arguments.options)
        os.execvp(command[0], command)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the engine prints is no answer
    _answer(load(arguments.model, arguments.threads, arguments.options), answers)


def check_lengths(made: list[int], num_tokens: int) -> None:
    """Raises RuntimeError unless every output has as many tokens as were asked for."""
    if any(count != num_tokens for count in made):
        raise RuntimeError(f"asked for {num_tokens} tokens, made {made}")


def _answer(generate: Generate, answers: Any) -> None:  # Any: a text file
    print(json.dumps({"loaded": True}), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            seconds = generate(asked["prompts"], asked["num_tokens"])
        except Exception as error:
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers)
            continue
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        print(json.dumps({"seconds": seconds, "peak_rss_bytes": peak}), file=answers)
