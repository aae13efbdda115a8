"""Checkpoints with SmolVLM's settings for pictures, which are the work of its vision workers, and with little else."""

from __future__ import annotations

import json
from pathlib import Path

_DEMO_FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]

# What SmolVLM's checkpoints say about pictures: up to 2048 pixels, in tiles of 512.
_SETTINGS = {
    "preprocessor_config.json": {
        "do_image_splitting": True,
        "size": {"longest_edge": 2048},
        "max_image_size": {"longest_edge": 512},
    },
    "processor_config.json": {"image_seq_len": 64},
    "config.json": {"scale_factor": 4, "vision_config": {"patch_size": 16, "image_size": 512}},
}
_TINY = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


def write_settings(demo: Path, folder: Path) -> Path:
    """A checkpoint around the demo model's tokenizer, without weights: what a vision worker needs."""
    for name in _DEMO_FILES:
        (folder / name).write_bytes((demo / name).read_bytes())
    for name, changes in _SETTINGS.items():
        (folder / name).write_text(json.dumps({**json.loads((demo / name).read_text()), **changes}))
    return folder


def write_tiny_model(demo: Path, folder: Path) -> Path:
    """The same with random weights of one small layer: what a server needs."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(write_settings(demo, folder))
    config.vision_config.update(_TINY)
    config.text_config.update({**_TINY, "num_key_value_heads": 1, "head_dim": 32})
    AutoModelForImageTextToText.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return folder
