"""What the demo model is made of, and the version that follows from it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from airside.cluster.demo_model.wheel import GGUF_SHA256

ASSETS = Path(__file__).parent / "assets"
VISION_WEIGHTS = "vision_connector.safetensors"
TEXT_ADAPTER = "text_adapter.safetensors"
CONFIG_FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)

_REVISION = "2"  # raised when the same parts are put together differently


def version() -> str:
    """Eight hex digits that change whenever a part or the way of building does."""
    digest = hashlib.sha256(f"{_REVISION} {GGUF_SHA256}".encode())
    for name in (VISION_WEIGHTS, TEXT_ADAPTER, *CONFIG_FILES):
        digest.update((ASSETS / name).read_bytes())
    return digest.hexdigest()[:8]
