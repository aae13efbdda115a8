"""`transformers.generate` in bfloat16, prompts of one length as one batch: pip install torch transformers."""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import wire


def is_installed() -> bool:
    """In the environment that runs this."""
    return importlib.util.find_spec("transformers") is not None


def load(model: str, threads: int, _options: dict[str, Any]) -> wire.Generate:
    """A checkpoint folder of a text model."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    loaded.generation_config.pad_token_id = 0

    def generate(prompts: wire.Prompts, num_tokens: int) -> float:
        ids = torch.tensor(prompts)
        began = time.perf_counter()
        with torch.inference_mode():
            made = loaded.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                do_sample=False,
            )
        seconds = time.perf_counter() - began
        wire.check_lengths([len(row) - ids.shape[1] for row in made], num_tokens)
        return seconds

    return generate


if __name__ == "__main__":
    wire.main(is_installed, load)
