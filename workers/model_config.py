"""What a checkpoint says about its model, as typed values. Imports no torch, so that any process may read it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROPE_TYPES = ("default", "linear", "llama3")


class CheckpointError(ValueError):
    """A checkpoint that cannot be served; the message names the file and what is wrong with it."""


class TensorParallelSizeError(ValueError):
    """A tensor parallel size that does not divide the model; the message names the sizes that do."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: `rope_type` is one of ROPE_TYPES, the factors are those of the type."""

    rope_type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    divisors: tuple[float, ...] = ()  # of each inverse frequency, when the checkpoint lists them (GGUF)


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The vision tower and its connector. Sizes are in pixels."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_channels: int
    image_size: int
    patch_size: int
    hidden_act: str
    layer_norm_eps: float
    scale_factor: int  # of the pixel shuffle: scale_factor**2 patches become one token


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model's shape. The text fields describe the decoder, whatever the family calls it."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]
    dtype: str | None  # of the stored weights, as the checkpoint says
    image_token_id: int | None = None  # None: a text model
    vision: VisionConfig | None = None


def load_model_config(path: str | Path) -> ModelConfig:
    """The config of a checkpoint folder (config.json) or of a .gguf file.

    Raises:
        CheckpointError: no such checkpoint, an unsupported architecture, or a feature that is not built.
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".gguf":
        from airside.workers.weights.gguf_metadata import read_gguf_config

        return _checked_heads(read_gguf_config(path), path)
    file = path / "config.json"
    config = _read_json(file)
    if config.get("quantization_config"):
        raise CheckpointError(f"{file}: quantized checkpoints are not supported; use one in bfloat16 or float32")
    names = config.get("architectures") or ["(none named)"]
    parse = _PARSERS.get(names[0])
    if parse is None:
        raise unsupported_architecture(names[0], file)
    try:
        return _checked_heads(parse(config, _eos_token_ids(path, config), file), file)
    except KeyError as error:
        raise CheckpointError(f"{file}: {error.args[0]} is missing") from error


def _checked_heads(config: ModelConfig, file: Path) -> ModelConfig:
    """The config, if attention can be computed with it."""
    if config.num_heads % config.num_kv_heads != 0:
        raise CheckpointError(
            f"{file}: {config.num_heads} attention heads cannot share {config.num_kv_heads} key-value heads evenly"
        )
    if config.head_dim % 2 != 0:
        raise CheckpointError(f"{file}: head_dim {config.head_dim} is odd; rotary embedding turns pairs")
    return config


def unsupported_architecture(name: str, file: Path) -> CheckpointError:
    """The error for a model that is not built here."""
    return CheckpointError(f"{file}: architecture {name} is not supported; supported: {', '.join(_PARSERS)}")


def tensor_parallel_sizes(config: ModelConfig) -> list[int]:
    """Every size that splits heads and MLP of this model evenly, ascending; 1 is always there."""
    parts = (config.num_heads, config.num_kv_heads, config.intermediate_size)
    return [size for size in range(1, config.num_kv_heads + 1) if all(part % size == 0 for part in parts)]


def check_tensor_parallel_size(config: ModelConfig, size: int) -> None:
    """Raises TensorParallelSizeError, naming the sizes that work, when `size` does not divide the model."""
    sizes = tensor_parallel_sizes(config)
    if size not in sizes:
        raise TensorParallelSizeError(
            f"tensor_parallel_size {size} does not divide {config.architecture} with {config.num_heads} attention "
            f"heads, {config.num_kv_heads} key-value heads and intermediate size {config.intermediate_size}; "
            f"sizes that work: {', '.join(map(str, sizes))}"
        )


def _read_json(file: Path) -> dict[str, Any]:  # Any: JSON
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist; a model is a checkpoint folder or a .gguf file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} is not a JSON object")
    return value


def _eos_token_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The generation config's end tokens come first, as `generate` of transformers reads them."""
    generation = folder / "generation_config.json"
    sources = [_read_json(generation)] if generation.exists() else []
    sources += [dict(config), config.get("text_config") or {}]
    for source in sources:
        eos = source.get("eos_token_id")
        if eos is not None:
            return tuple(eos) if isinstance(eos, list) else (int(eos),)
    return ()


def _parse_llama(config: Mapping[str, Any], eos_token_ids: tuple[int, ...], file: Path) -> ModelConfig:
    return _decoder("LlamaForCausalLM", config, config.get("tie_word_embeddings", False), eos_token_ids, file)


def _parse_idefics3(config: Mapping[str, Any], eos_token_ids: tuple[int, ...], file: Path) -> ModelConfig:
    text = {"rms_norm_eps": 1e-5, **config["text_config"]}
    if text.get("model_type", "llama") != "llama":
        raise CheckpointError(f"{file}: a text model of type {text['model_type']} is not supported; supported: llama")
    tied = config.get("tie_word_embeddings", False)
    decoder = _decoder("Idefics3ForConditionalGeneration", text, tied, eos_token_ids, file)
    return dataclasses.replace(
        decoder,
        dtype=config.get("dtype") or config.get("torch_dtype") or decoder.dtype,
        image_token_id=config.get("image_token_id", 128_257),
        vision=_vision(config.get("vision_config") or {}, config.get("scale_factor", 2)),
    )


_PARSERS = {"LlamaForCausalLM": _parse_llama, "Idefics3ForConditionalGeneration": _parse_idefics3}
SUPPORTED_ARCHITECTURES = tuple(_PARSERS)


def _decoder(
    architecture: str, text: Mapping[str, Any], tied: bool, eos_token_ids: tuple[int, ...], file: Path
) -> ModelConfig:
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
        rope=_rope(text, max_position_embeddings, file),
        tie_word_embeddings=bool(tied),
        attention_bias=text.get("attention_bias", False),
        mlp_bias=text.get("mlp_bias", False),
        eos_token_ids=eos_token_ids,
        dtype=text.get("dtype") or text.get("torch_dtype"),
    )


def _rope(text: Mapping[str, Any], max_position_embeddings: int, file: Path) -> RopeConfig:
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
