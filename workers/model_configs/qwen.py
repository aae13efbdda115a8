"""Qwen2, Qwen3, and MiMo, which is a Qwen2 with a draft head."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from airside.workers.model_config import CheckpointError, ModelConfig
from airside.workers.model_configs.decoder import decoder


def _parse_qwen2(config: Mapping[str, Any], eos_token_ids: tuple[int, ...], file: Path) -> ModelConfig:
    _refuse_sliding_windows(config, file)
    tied = config.get("tie_word_embeddings", False)
    qwen = decoder("Qwen2ForCausalLM", config, tied, eos_token_ids, file)
    return dataclasses.replace(qwen, attention_bias=True, attention_out_bias=False)


def _parse_qwen3(config: Mapping[str, Any], eos_token_ids: tuple[int, ...], file: Path) -> ModelConfig:
    _refuse_sliding_windows(config, file)
    tied = config.get("tie_word_embeddings", False)
    qwen = decoder("Qwen3ForCausalLM", {"head_dim": 128, **config}, tied, eos_token_ids, file)
    return dataclasses.replace(qwen, qk_norm=True)


def _parse_mimo(config: Mapping[str, Any], eos_token_ids: tuple[int, ...], file: Path) -> ModelConfig:
    qwen = _parse_qwen2(config, eos_token_ids, file)
    num_draft_layers = min(1, config.get("num_nextn_predict_layers", 0))  # the first of them can do the others' work
    return dataclasses.replace(qwen, architecture="MiMoForCausalLM", num_draft_layers=num_draft_layers)


def _refuse_sliding_windows(config: Mapping[str, Any], file: Path) -> None:
    """Qwen's layers from `max_window_layers` on look back on a window only, when the config turns that on."""
    layer_types = config.get("layer_types")
    if layer_types is None:
        first = config.get("max_window_layers", 28)
        is_sliding = bool(config.get("use_sliding_window")) and first < config["num_hidden_layers"]
    else:
        is_sliding = "sliding_attention" in layer_types
    if is_sliding:
        raise CheckpointError(f"{file}: sliding window attention is not supported; use a model without it")


PARSERS = {"Qwen2ForCausalLM": _parse_qwen2, "Qwen3ForCausalLM": _parse_qwen3, "MiMoForCausalLM": _parse_mimo}
