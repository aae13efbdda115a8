"""LFM2."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from airside.workers.model_config import CheckpointError, ModelConfig, ShortConvConfig
from airside.workers.model_configs.decoder import decoder


def _parse_lfm2(config: Mapping[str, Any], eos_token_ids: tuple[int, ...], file: Path) -> ModelConfig:
    tied = config.get("tie_embedding", config.get("tie_word_embeddings", True))
    text = {
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 128_000,
        **config,
        "rms_norm_eps": config.get("norm_eps", 1e-5),
        "intermediate_size": _lfm2_intermediate_size(config),
        "attention_bias": False,
        "mlp_bias": False,
    }
    if config.get("engram"):
        raise CheckpointError(f"{file}: n-gram embeddings (engram) are not supported in Lfm2ForCausalLM")
    num_layers = config["num_hidden_layers"]
    attending = config.get("full_attn_idxs")
    types = config.get("layer_types") or [
        "full_attention" if attending is None or layer_id in attending else "conv" for layer_id in range(num_layers)
    ]
    if len(types) != num_layers or set(types) - {"conv", "full_attention"}:
        raise CheckpointError(f"{file}: layer_types must name each of {num_layers} layers conv or full_attention")
    convolutions = ShortConvConfig(
        layers=tuple(layer_id for layer_id, kind in enumerate(types) if kind == "conv"),
        kernel_size=config.get("conv_L_cache", 3),
        bias=bool(config.get("conv_bias", False)),
    )
    return dataclasses.replace(
        decoder("Lfm2ForCausalLM", text, tied, eos_token_ids, file),
        qk_norm=True,
        short_conv=convolutions if convolutions.layers else None,
    )


def _lfm2_intermediate_size(config: Mapping[str, Any]) -> int:
    """The MLP's width: what the config calls so is half as large again unless it says otherwise."""
    size = int(config["block_ff_dim"] if "block_ff_dim" in config else config["intermediate_size"])
    if not config.get("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    multiplier = config.get("block_ffn_dim_multiplier", 1.0)
    if multiplier is None:
        return size
    multiple = int(config.get("block_multiple_of", 256))
    return multiple * -(-int(multiplier * size) // multiple)


PARSERS = {"Lfm2ForCausalLM": _parse_lfm2}
