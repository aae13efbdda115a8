"""One parser per architecture: from config.json to a ModelConfig. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from airside.workers.model_config import (
    ROPE_TYPES,
    CheckpointError,
    EngramConfig,
    ModelConfig,
    RopeConfig,
    ShortConvConfig,
    VisionConfig,
)

Parser = Callable[[Mapping[str, Any], tuple[int, ...], Path], ModelConfig]  # Any: JSON
"""`(config, eos_token_ids, file)`. Raises CheckpointError, or KeyError for a key that the config must have."""

_ROWS_PER_TABLE_MIN = 16  # up to so many times any count there are more primes than that


def _parse_llama(config: Mapping[str, Any], eos_token_ids: tuple[int, ...], file: Path) -> ModelConfig:
    return decoder("LlamaForCausalLM", config, config.get("tie_word_embeddings", False), eos_token_ids, file)


def _parse_idefics3(config: Mapping[str, Any], eos_token_ids: tuple[int, ...], file: Path) -> ModelConfig:
    text = {"rms_norm_eps": 1e-5, **config["text_config"]}
    if text.get("model_type", "llama") != "llama":
        raise CheckpointError(f"{file}: a text model of type {text['model_type']} is not supported; supported: llama")
    tied = config.get("tie_word_embeddings", False)
    language = decoder("Idefics3ForConditionalGeneration", text, tied, eos_token_ids, file)
    return dataclasses.replace(
        language,
        dtype=config.get("dtype") or config.get("torch_dtype") or language.dtype,
        image_token_id=config.get("image_token_id", 128_257),
        vision=_vision(config.get("vision_config") or {}, config.get("scale_factor", 2)),
    )


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


def _vision(vision: Mapping[str, Any], scale_factor: int) -> VisionConfig:
    return VisionConfig(
        hidden_size=vision.get("hidden_size", 1152),
        intermediate_size=vision.get("intermediate_size", 3072),
        num_layers=vision.get("num_hidden_layers", 12),
        num_heads=vision.get("num_attention_heads", 16),
        num_channels=vision.get("num_channels", 3),
        image_size=vision.get("image_size", 224),
        patch_size=vision.get("patch_size", 32),
        hidden_act=vision.get("hidden_act", "gelu_pytorch_tanh"),
        layer_norm_eps=vision.get("layer_norm_eps", 1e-6),
        scale_factor=scale_factor,
    )


PARSERS: dict[str, Parser] = {
    "LlamaForCausalLM": _parse_llama,
    "Idefics3ForConditionalGeneration": _parse_idefics3,
    "Qwen2ForCausalLM": _parse_qwen2,
    "Qwen3ForCausalLM": _parse_qwen3,
    "MiMoForCausalLM": _parse_mimo,
    "Lfm2ForCausalLM": _parse_lfm2,
}
SUPPORTED_ARCHITECTURES = tuple(PARSERS)
