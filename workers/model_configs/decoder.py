"""What the decoders of all families say in the same words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from airside.workers.model_config import ROPE_TYPES, CheckpointError, EngramConfig, ModelConfig, RopeConfig

_ROWS_PER_TABLE_MIN = 16  # up to so many times any count there are more primes than that


def decoder(
    architecture: str, text: Mapping[str, Any], tied: bool, eos_token_ids: tuple[int, ...], file: Path
) -> ModelConfig:
    """What the decoders of all families say in the same words; `text` is the part of the config that describes it."""
    if text.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{file}: hidden_act {text['hidden_act']} is not supported; supported: silu")
    num_heads = text["num_attention_heads"]
    max_position_embeddings = text.get("max_position_embeddings", 2048)
    return ModelConfig(
        architecture=architecture,
        vocab_size=text["vocab_size"],
        hidden_size=text["hidden_size"],
        intermediate_size=text["intermediate_size"],
        num_layers=text["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=text.get("num_key_value_heads") or num_heads,
        head_dim=text.get("head_dim") or text["hidden_size"] // num_heads,
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=text.get("rms_norm_eps", 1e-6),
        rope=read_rope(text, max_position_embeddings, file),
        tie_word_embeddings=bool(tied),
        attention_bias=text.get("attention_bias", False),
        attention_out_bias=text.get("attention_bias", False),
        mlp_bias=text.get("mlp_bias", False),
        eos_token_ids=eos_token_ids,
        dtype=text.get("dtype") or text.get("torch_dtype"),
        engram=_engram(text["engram"], text["num_hidden_layers"], file) if text.get("engram") else None,
    )


def read_rope(text: Mapping[str, Any], max_position_embeddings: int, file: Path) -> RopeConfig:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    values = {**(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
    rope_type = values.get("rope_type") or values.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise CheckpointError(f"{file}: rope type {rope_type} is not supported; supported: {', '.join(ROPE_TYPES)}")
    if values.get("partial_rotary_factor", text.get("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError(f"{file}: partial_rotary_factor is not supported")
    return RopeConfig(
        rope_type=rope_type,
        theta=float(values.get("rope_theta") or text.get("rope_theta") or 10_000.0),
        factor=float(values.get("factor", 1.0)),
        low_freq_factor=float(values.get("low_freq_factor", 1.0)),
        high_freq_factor=float(values.get("high_freq_factor", 4.0)),
        original_max_position_embeddings=values.get("original_max_position_embeddings") or max_position_embeddings,
    )


def _engram(engram: Mapping[str, Any], num_layers: int, file: Path) -> EngramConfig:
    config = EngramConfig(
        layers=tuple(engram["layers"]),
        table_size=engram["table_size"],
        num_heads=engram["num_heads"],
        dim=engram["dim"],
        max_ngram=engram.get("max_ngram", 3),
        seed=engram.get("seed", 0),
        tokenizer_file=str(file.parent / "tokenizer.json"),
    )
    if not all(0 <= layer_id < num_layers for layer_id in config.layers):
        raise CheckpointError(f"{file}: engram.layers {list(config.layers)} are not all among the {num_layers} layers")
    if config.max_ngram < 2:
        raise CheckpointError(f"{file}: engram.max_ngram {config.max_ngram} leaves no n-gram; 2 is the least")
    if config.table_size < _ROWS_PER_TABLE_MIN * config.num_tables:
        raise CheckpointError(
            f"{file}: engram.table_size {config.table_size} is too small for {config.num_tables} tables of different "
            f"prime sizes; {_ROWS_PER_TABLE_MIN * config.num_tables} is the least"
        )
    return config
