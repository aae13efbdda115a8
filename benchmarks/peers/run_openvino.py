"""OpenVINO GenAI's continuous-batching pipeline, with its own defaults (a KV cache of 8 bits among them):

PEERS/openvino/bin/pip install openvino-genai
"""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import wire

KV_CACHE_GB = 2
BATCHED_TOKENS_MAX = 2048


def is_installed() -> bool:
    """In the environment that runs this."""
    return importlib.util.find_spec("openvino_genai") is not None


def load(model: str, threads: int, _options: dict[str, Any]) -> wire.Generate:
    """A folder that `optimum-cli export openvino` made."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = KV_CACHE_GB
    scheduler.max_num_batched_tokens = BATCHED_TOKENS_MAX
    scheduler.enable_prefix_caching = False
    pipeline = genai.ContinuousBatchingPipeline(
        model, scheduler_config=scheduler, device="CPU", properties={"INFERENCE_NUM_THREADS": threads}
    )

    def generate(prompts: wire.Prompts, num_tokens: int) -> float:
        config = genai.GenerationConfig(max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False)
        config.ignore_eos = True
        inputs = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        began = time.perf_counter()
        made = pipeline.generate(inputs, [config] * len(inputs))
        seconds = time.perf_counter() - began
        wire.check_lengths([len(each.m_generation_ids[0]) for each in made], num_tokens)
        return seconds

    return generate


if __name__ == "__main__":
    wire.main(is_installed, load)
