"""OpenVINO GenAI's continuous-batching pipeline, with its own defaults (a KV cache of 8 bits among them):

PEERS/openvino/bin/pip install openvino-genai
"""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import wire

KV_CACHE_GB = 2
BATCHED_TOKENS_MAX = 2048


def is_installed() -> bool:
    """In the environment that runs this."""
    return importlib.util.find_spec("openvino_genai") is not None


def make_pipeline(model: str, threads: int) -> Any:  # Any: openvino is only in its own environment
    """A ContinuousBatchingPipeline over a folder that `optimum-cli export openvino` made."""
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = KV_CACHE_GB
    scheduler.max_num_batched_tokens = BATCHED_TOKENS_MAX
    scheduler.enable_prefix_caching = False
    return genai.ContinuousBatchingPipeline(
        model, scheduler_config=scheduler, device="CPU", properties={"INFERENCE_NUM_THREADS": threads}
    )


def make_config(num_tokens: int) -> Any:  # Any: as above
    """Greedy, exactly so many tokens."""
    import openvino_genai as genai

    config = genai.GenerationConfig(max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False)
    config.ignore_eos = True
    return config


def load(model: str, threads: int, _options: dict[str, Any]) -> wire.Generate:
    """The same folder."""
    import numpy as np
    import openvino

    pipeline = make_pipeline(model, threads)

    def generate(prompts: wire.Prompts, num_tokens: int) -> float:
        inputs = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        began = time.perf_counter()
        made = pipeline.generate(inputs, [make_config(num_tokens)] * len(inputs))
        seconds = time.perf_counter() - began
        wire.check_lengths([len(each.m_generation_ids[0]) for each in made], num_tokens)
        return seconds

    return generate


def serve_command(model: str, threads: int, port: int, _options: dict[str, Any]) -> list[str]:
    """A small server over the same pipeline."""
    return [sys.executable, str(Path(__file__).with_name("openvino_server.py")), model, str(threads), str(port)]


if __name__ == "__main__":
    wire.main(is_installed, load, serve_command)
