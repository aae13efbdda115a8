"""What a checkpoint says about its model, as typed values. Imports no torch, so that any process may read it."""

from __future__ import annotations

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
class RopeAxes:
    """Three axes of positions: time, height, width (M-RoPE: Wang et al. 2024, arXiv 2409.12191).

    Text has the same position on all three, a picture's tokens have their places in it.
    """

    sections: tuple[int, ...]  # so many of a head's rotary pairs turn with each axis in turn, the first again after all
    merge_size: int  # a token is a square of so many by so many of the patches that `image_grid_thw` counts


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """What the vision tower and what joins it to the decoder look like: each family has a subclass, with its parser."""


@dataclass(frozen=True, slots=True)
class ShortConvConfig:
    """Gated causal convolutions in place of attention in some layers."""

    layers: tuple[int, ...]  # the decoder's layers that are convolutions; the others attend
    kernel_size: int  # tokens that a result depends on, its own among them
    bias: bool

    @property
    def history(self) -> int:
        """How many tokens before its own a result depends on."""
        return self.kernel_size - 1


@dataclass(frozen=True, slots=True)
class EngramConfig:
    """Embeddings of hashed n-grams, added to the hidden state before some layers."""

    layers: tuple[int, ...]
    table_size: int  # rows of each hash table; taken down to a prime, another for each
    num_heads: int  # hash tables of each length of n-gram
    dim: int  # of a table's rows
    max_ngram: int  # n-grams of 2 up to so many tokens
    seed: int  # of the hash functions
    tokenizer_file: str  # which says what tokens have the same text

    @property
    def num_tables(self) -> int:
        """Hash tables of one layer."""
        return self.num_heads * (self.max_ngram - 1)


@dataclass(frozen=True, slots=True)
class SlidingWindowConfig:
    """Layers whose tokens see the last few positions only. Their cache holds all of them nevertheless."""

    layers: tuple[int, ...]
    window: int  # positions that a token sees up to and with its own
    rope: RopeConfig  # of these layers


@dataclass(frozen=True, slots=True)
class PictureTokens:
    """How pictures stand in a prompt, and how their tokens are computed, where image tokens alone do not say it."""

    mark_id: int | None = None  # stands for a picture in a prompt; None: the image token does
    mark_text: tuple[str, str] = ("", "")  # what a prompt's text gets before and after each mark
    num_atomic: int = 0  # tokens of a picture, that attend to one another; 0: attention is causal
    takes_pixel_ranges: bool = False  # a request may say within how many pixels a picture is scaled


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
    attention_out_bias: bool = False  # `attention_bias` is of query, key and value alone
    qk_norm: bool = False  # each head's query and key are normalised before they are rotated
    num_draft_layers: int = 0  # 1: there is a draft head, and it is to be used
    image_token_id: int | None = None  # None: a text model
    pictures: PictureTokens = PictureTokens()
    vision: VisionConfig | None = None
    short_conv: ShortConvConfig | None = None
    engram: EngramConfig | None = None
    rope_axes: RopeAxes | None = None  # None: one position per token
    sliding: SlidingWindowConfig | None = None
    attention_scale: float | None = None  # of scores; None: head_dim ** -0.5
    zero_centred_norms: bool = False  # as in ops.rms_norm

    @property
    def picture_ids(self) -> tuple[int, ...]:
        """Tokens that stand for pictures, in prompts or in the model: it never makes them itself."""
        ids = (self.image_token_id, self.pictures.mark_id)
        return tuple(token_id for token_id in ids if token_id is not None)

    @property
    def num_attention_layers(self) -> int:
        """Decoder layers with keys and values; the draft head's are not among them."""
        return self.num_layers - (0 if self.short_conv is None else len(self.short_conv.layers))

    @property
    def tail_tokens(self) -> int:
        """How many token ids before each row the model looks back on (`StepPlan.tail_ids`)."""
        return 0 if self.engram is None else self.engram.max_ngram - 1


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
    from airside.workers.model_configs.registry import PARSERS  # which needs the types above

    names = config.get("architectures") or ["(none named)"]
    parse = PARSERS.get(names[0])
    if parse is None:
        raise CheckpointError(f"{file}: architecture {names[0]} is not supported; supported: {', '.join(PARSERS)}")
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
    if config.num_attention_layers == 0:
        raise CheckpointError(f"{file}: a model without attention layers is not supported")
    return config


def tensor_parallel_sizes(config: ModelConfig) -> list[int]:
    """Every size that splits heads and MLP of this model evenly, ascending; 1 is always there."""
    parts = [config.num_heads, config.num_kv_heads, config.intermediate_size]
    if config.short_conv is not None:
        parts.append(config.hidden_size)  # the channels of a convolution
    if config.engram is not None:
        parts.append(config.engram.num_tables)
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


def check_block_size(config: ModelConfig, block_size: int) -> None:
    """Raises CheckpointError when a block holds fewer tokens than the model's convolutions look back on."""
    history = 0 if config.short_conv is None else config.short_conv.history
    if block_size < history:
        raise CheckpointError(
            f"block_size {block_size} is too small for {config.architecture}, whose convolutions look back on "
            f"{history} tokens; set engine.block_size to {history} or more"
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
