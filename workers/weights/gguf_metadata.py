"""A GGUF file's metadata as a ModelConfig. Imports no torch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from gguf import GGUFReader

from airside.workers.model_config import CheckpointError, ModelConfig, RopeConfig

ARCHITECTURES = {"llama": "LlamaForCausalLM"}
"""GGUF's names of the architectures that are read, and ours."""

_ROPE_TYPES = {"none": "default", "linear": "linear"}


@functools.lru_cache(maxsize=1)  # config and weights are read one after the other, and the vocabulary takes seconds
def open_gguf(path: Path) -> GGUFReader:
    """Maps the file. Raises CheckpointError when it is not a GGUF file."""
    try:
        return GGUFReader(path)
    except (OSError, ValueError, IndexError) as error:
        raise CheckpointError(f"{path} cannot be read as a GGUF file: {error}") from error


def read_gguf_config(path: Path) -> ModelConfig:
    """The config of a GGUF file.

    Raises:
        CheckpointError: not a GGUF file, an unsupported architecture, or a missing key.
    """
    return gguf_config(open_gguf(path), path)


def gguf_config(reader: GGUFReader, path: Path) -> ModelConfig:
    """The config of an open GGUF file; errors as in `read_gguf_config`."""
    family = _value(reader, path, "general.architecture")
    if family not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: GGUF architecture {family} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )

    def value(key: str, default: Any = None) -> Any:  # Any: what the file holds
        return _value(reader, path, f"{family}.{key}", default)

    num_heads = value("attention.head_count")
    head_dim = value("attention.key_length", value("embedding_length") // num_heads)
    if value("rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(f"{path}: rotary embedding of a part of each head is not supported")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    embedding = tensors.get("token_embd.weight")
    return ModelConfig(
        architecture=ARCHITECTURES[family],
        vocab_size=value("vocab_size") if embedding is None else int(embedding.shape[1]),
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_layers=value("block_count"),
        num_heads=num_heads,
        num_kv_heads=value("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=value("context_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope=_rope(reader, path, family),
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        attention_out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        eos_token_ids=_eos_token_ids(reader),
        dtype=None,
    )


def _value(reader: GGUFReader, path: Path, key: str, default: Any = None) -> Any:  # Any: what the file holds
    field = reader.get_field(key)
    if field is not None:
        return field.contents()
    if default is None:
        raise CheckpointError(f"{path}: metadata key {key} is missing")
    return default


def _eos_token_ids(reader: GGUFReader) -> tuple[int, ...]:
    field = reader.get_field("tokenizer.ggml.eos_token_id")
    return () if field is None else (int(field.contents()),)


def _rope(reader: GGUFReader, path: Path, family: str) -> RopeConfig:
    # As llama.cpp reads it: a factor without a type is linear. Its Llama 3 files list their divisors and name no type.
    rope_type = _value(reader, path, f"{family}.rope.scaling.type", "linear")
    if rope_type not in _ROPE_TYPES:
        raise CheckpointError(f"{path}: rope scaling {rope_type} is not supported; supported: {', '.join(_ROPE_TYPES)}")
    listed = [tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight"]
    return RopeConfig(
        rope_type=_ROPE_TYPES[rope_type],
        theta=float(_value(reader, path, f"{family}.rope.freq_base", 10_000.0)),
        factor=float(_value(reader, path, f"{family}.rope.scaling.factor", 1.0)),
        divisors=tuple(float(divisor) for divisor in listed[0]) if listed else (),
    )
