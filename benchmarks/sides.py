"""The two things compared, behind one shape: a checkpoint in processes of its own, that turns prompts to tokens.

Each side times itself around its own call, with the clock of the process that makes it.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import psutil

Prompts = list[list[int]]


class Side(Protocol):
    """Something that generates greedily, exactly `num_tokens` per prompt."""

    name: str

    def generate(self, prompts: Prompts, num_tokens: int) -> float:
        """Computes all prompts together; the seconds it took. Raises RuntimeError when tokens are missing."""

    def peak_rss_bytes(self) -> dict[str, int]:
        """Per process, the most memory that was resident since its start."""

    def close(self) -> None:
        """Ends the processes."""


class AirsideSide:
    """Airside's `LLM`: controller, worker and vision worker as children of this process.

    Args:
        checkpoint: the model's folder.
        engine: keys of the `engine` block.
    """

    name = "Airside"

    def __init__(self, checkpoint: Path, **engine: Any) -> None:  # Any: checked by the configuration
        from airside import LLM

        known = {child.pid for child in psutil.Process().children(recursive=True)}
        self._llm = LLM(str(checkpoint), dtype="bfloat16", **engine)
        started = [child for child in psutil.Process().children(recursive=True) if child.pid not in known]
        self._processes = {_module(child): child.pid for child in started}

    def generate(self, prompts: Prompts, num_tokens: int) -> float:
        """See `Side`."""
        from airside import SamplingParams

        started = time.perf_counter()
        outputs = self._llm.generate(prompts, SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True))
        seconds = time.perf_counter() - started
        if any(len(output.token_ids) != num_tokens for output in outputs):
            raise RuntimeError(f"Airside made fewer tokens than asked: {[o.finish_reason for o in outputs]}")
        return seconds

    def controller_step_s(self) -> float:
        """The controller's own work per step: the median of its last 512 steps."""
        return self._llm.stats()["controller_step_s"]

    def peak_rss_bytes(self) -> dict[str, int]:
        """See `Side`."""
        return {name: peak_rss_bytes(pid) for name, pid in self._processes.items()}

    def close(self) -> None:
        """See `Side`."""
        self._llm.close()


class TransformersSide:
    """`transformers.generate` in a child process, on the text model alone, with all cores."""

    name = "transformers"

    def __init__(self, checkpoint: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve_transformers, args=(theirs, checkpoint), daemon=True)
        self._process.start()
        theirs.close()
        self._connection.recv()  # loaded

    def generate(self, prompts: Prompts, num_tokens: int) -> float:
        """See `Side`; prompts of one length, as one batch."""
        self._connection.send((prompts, num_tokens))
        seconds = self._connection.recv()
        if not isinstance(seconds, float):
            raise RuntimeError(f"transformers: {seconds}")
        return seconds

    def peak_rss_bytes(self) -> dict[str, int]:
        """See `Side`."""
        assert self._process.pid is not None
        return {"transformers": peak_rss_bytes(self._process.pid)}

    def close(self) -> None:
        """See `Side`."""
        self._connection.close()
        self._process.join()


def _serve_transformers(connection: Connection, checkpoint: Path) -> None:
    """The child: loads the model, then answers one request after another until the other end closes."""
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    model = _load_text_model(checkpoint)
    connection.send("loaded")
    while True:
        try:
            prompts, num_tokens = connection.recv()
        except EOFError:
            return
        ids = torch.tensor(prompts)
        started = time.perf_counter()
        with torch.inference_mode():
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                do_sample=False,
            )
        seconds = time.perf_counter() - started
        complete = made.shape == (ids.shape[0], ids.shape[1] + num_tokens)
        connection.send(seconds if complete else f"made a tensor of {tuple(made.shape)}")


def _load_text_model(checkpoint: Path) -> Any:  # Any: transformers' models have no useful types
    """A causal model in bfloat16; of an image-to-text checkpoint the text part, so that it pays for nothing else."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(checkpoint)
    if getattr(config, "vision_config", None) is None:
        return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    whole = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.bfloat16)
    with torch.device("meta"):  # the parts are put in below; nothing is allocated twice
        text = AutoModelForCausalLM.from_config(config.text_config, dtype=torch.bfloat16)
    text.model = whole.model.text_model
    text.lm_head = whole.lm_head
    text.generation_config.pad_token_id = config.text_config.eos_token_id
    return text.eval()


def _module(process: psutil.Process) -> str:
    """`airside.workers` of `python -m airside.workers ...`."""
    arguments = process.cmdline()
    return next((argument for argument in arguments if argument.startswith("airside.")), process.name())


def peak_rss_bytes(pid: int) -> int:
    """The most memory that a process has had resident since its start."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} has no resident memory")
