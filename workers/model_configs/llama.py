"""Llama."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from airside.workers.model_config import ModelConfig
from airside.workers.model_configs.decoder import decoder


def _parse_llama(config: Mapping[str, Any], eos_token_ids: tuple[int, ...], file: Path) -> ModelConfig:
    return decoder("LlamaForCausalLM", config, config.get("tie_word_embeddings", False), eos_token_ids, file)


PARSERS = {"LlamaForCausalLM": _parse_llama}
