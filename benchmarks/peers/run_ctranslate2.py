"""CTranslate2, which computes in float32 or int8:

PEERS/ctranslate2/bin/pip install ctranslate2
"""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import wire


def is_installed() -> bool:
    """In the environment that runs this."""
    return importlib.util.find_spec("ctranslate2") is not None


def load(model: str, threads: int, _options: dict[str, Any]) -> wire.Generate:
    """A folder that its converter made."""
    import ctranslate2

    generator = ctranslate2.Generator(model, device="cpu", inter_threads=1, intra_threads=threads)
    vocabulary = json.loads((Path(model) / "vocabulary.json").read_text())

    def generate(prompts: wire.Prompts, num_tokens: int) -> float:
        tokens = [[vocabulary[token_id] for token_id in prompt] for prompt in prompts]
        began = time.perf_counter()
        made = generator.generate_batch(
            tokens,
            max_batch_size=len(tokens),
            beam_size=1,
            sampling_topk=1,
            min_length=num_tokens,
            max_length=num_tokens,
            include_prompt_in_result=False,
        )
        seconds = time.perf_counter() - began
        wire.check_lengths([len(each.sequences_ids[0]) for each in made], num_tokens)
        return seconds

    return generate


if __name__ == "__main__":
    wire.main(is_installed, load)
