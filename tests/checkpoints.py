"""Tiny checkpoints with random weights, made by transformers itself, complete with tokenizer and processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

from tests.byte_level import train_byte_level

VOCAB_SIZE = 512
IMAGE_TOKENS_PER_TILE = 4
TILE_PIXELS = 32
SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
]
IMAGE_TOKEN_ID = SPECIAL_TOKENS.index("<image>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SENTENCES = [
    f"The {size} {colour} {shape} is {place} the picture, and the {other} waits at the gate until it opens."
    for size in ("small", "large", "narrow")
    for colour in ("red", "blue", "green", "yellow", "purple")
    for shape in ("circle", "square", "triangle", "aeroplane")
    for place in ("in the middle of", "left of", "to the right of", "nowhere near")
    for other in ("passenger", "captain", "suitcase")
]
# They fill the vocabulary.
_WORDS = [a + b + c + d for a in "bdfgklmnprst" for b in "aeiou" for c in "lmnrst" for d in "aeo"]


def make_llama(path: Path, *, tied: bool = True, seed: int = 0, max_shard_size: str = "1GB", **changes: Any) -> Path:
    """A Llama with 8 heads over 2 key-value heads of 16, two layers, and a byte-level tokenizer.

    Args:
        path: the folder to write.
        changes: LlamaConfig values that differ.
    Returns: path.
    """
    config = LlamaConfig(**{**_text_values(), "tie_word_embeddings": tied, **changes})
    _save(LlamaForCausalLM, config, path, seed, max_shard_size)
    make_tokenizer().save_pretrained(path)
    return path


def make_idefics3(path: Path, *, tied: bool = True, seed: int = 0, max_shard_size: str = "1GB") -> Path:
    """An Idefics3 over the same Llama: 32-pixel tiles of 16 patches and 4 tokens; pictures up to 64 pixels are split.

    Returns: path, which transformers' AutoProcessor and AutoModelForImageTextToText load.
    """
    text = {**_text_values(), "model_type": "llama", "tie_word_embeddings": tied}
    vision = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": TILE_PIXELS,
        "patch_size": 8,
        "initializer_range": 0.1,
    }
    config = Idefics3Config(
        text_config=text,
        vision_config=vision,
        scale_factor=2,
        image_token_id=IMAGE_TOKEN_ID,
        tie_word_embeddings=tied,
        eos_token_id=text["eos_token_id"],
        initializer_range=text["initializer_range"],
    )
    _save(Idefics3ForConditionalGeneration, config, path, seed, max_shard_size)
    image_processor = Idefics3ImageProcessorPil(
        do_image_splitting=True, size={"longest_edge": 2 * TILE_PIXELS}, max_image_size={"longest_edge": TILE_PIXELS}
    )
    processor = Idefics3Processor(
        image_processor, make_tokenizer(), image_seq_len=IMAGE_TOKENS_PER_TILE, chat_template=CHAT_TEMPLATE
    )
    processor.save_pretrained(path)
    image_processor.save_pretrained(path)
    return path


def make_qwen2(path: Path, *, tied: bool = True, seed: int = 0, max_shard_size: str = "1GB", **changes: Any) -> Path:
    """A Qwen2 of the Llama's sizes; changes are Qwen2Config values that differ. Returns: path."""
    values = {key: value for key, value in _text_values().items() if key != "head_dim"}
    config = Qwen2Config(**{**values, "tie_word_embeddings": tied, **changes})
    _save(Qwen2ForCausalLM, config, path, seed, max_shard_size)
    make_tokenizer().save_pretrained(path)
    return path


def make_qwen3(path: Path, *, tied: bool = True, seed: int = 0, max_shard_size: str = "1GB", **changes: Any) -> Path:
    """A Qwen3 of the Llama's sizes; changes are Qwen3Config values that differ. Returns: path."""
    config = Qwen3Config(**{**_text_values(), "tie_word_embeddings": tied, **changes})
    _save(Qwen3ForCausalLM, config, path, seed, max_shard_size)
    make_tokenizer().save_pretrained(path)
    return path


def make_mimo(path: Path, *, seed: int = 0, context: float | None = None, **changes: Any) -> Path:
    """A MiMo: `make_qwen2`, untied, and a draft layer in the tensors of XiaomiMiMo/MiMo-7B-Base.

    Args:
        context: when given, the next token depends on the one before it, which the draft layer knows how to do, and so
            much on all others: with 0.0 every draft is right. Otherwise hardly any is.
        changes: Qwen2Config values that differ.
    Returns: path, which transformers loads as a Qwen2 when it is told to.
    """
    make_qwen2(path, tied=False, seed=seed, **changes)
    file = path / "model.safetensors"
    tensors = load_file(file)
    layer = _draft_layer(tensors, seed)
    if context is not None:
        _scale_context(tensors, layer, context)
    save_file(tensors | {f"model.mtp_layers.0.{name}": tensor for name, tensor in layer.items()}, file)
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    return path


def _draft_layer(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """A random decoder layer like the others, and what a draft layer has beside that."""
    shapes = {
        name.removeprefix("model.layers.0."): tensor.shape
        for name, tensor in tensors.items()
        if name.startswith("model.layers.0.")
    }
    hidden = tensors["model.norm.weight"].shape
    shapes |= {f"{name}_layernorm.weight": hidden for name in ("token", "hidden", "final")}
    shapes["input_proj.weight"] = torch.Size([hidden[0], 2 * hidden[0]])
    generator = torch.Generator().manual_seed(seed)
    layer = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in sorted(shapes.items())}
    return {name: tensor + 1.0 if "norm" in name else tensor for name, tensor in layer.items()}


def _scale_context(tensors: dict[str, torch.Tensor], layer: dict[str, torch.Tensor], factor: float) -> None:
    for part in (tensors, layer):
        for name, tensor in part.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.mul_(factor)
    hidden = len(layer["input_proj.weight"])
    layer["input_proj.weight"] = torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], dim=1)
    layer["token_layernorm.weight"] = torch.ones(hidden)
    layer["final_layernorm.weight"] = tensors["model.norm.weight"].clone()


def make_lfm2(path: Path, *, tied: bool = True, seed: int = 0, max_shard_size: str = "1GB", **changes: Any) -> Path:
    """An LFM2 of the Llama's sizes with layers that convolve, attend, convolve and convolve.

    Args:
        path: the folder to write.
        changes: Lfm2Config values that differ.
    Returns: path.
    """
    values = {
        **_text_values(),
        "norm_eps": 1e-5,
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "block_multiple_of": 16,
        "tie_word_embeddings": tied,
        **changes,
    }
    del values["rms_norm_eps"]
    _save(Lfm2ForCausalLM, Lfm2Config(**values), path, seed, max_shard_size)
    make_tokenizer().save_pretrained(path)
    return path


def add_engram(path: Path, hidden_size: int, rows: int, engram: dict[str, Any], prefix: str = "model.") -> None:
    """Gives the decoder of a saved checkpoint random n-gram embeddings.

    Args:
        rows: of all hash tables of a layer together.
        engram: the config's key of that name.
        prefix: of the decoder's tensors.
    """
    file = path / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(1)
    width = engram["num_heads"] * (engram.get("max_ngram", 3) - 1) * engram["dim"]
    shapes = {"tables": (rows, engram["dim"]), "kv_proj": (2 * hidden_size, width)}
    shapes |= {"hidden_norm": (hidden_size,), "key_norm": (hidden_size,)}
    for layer_id in engram["layers"]:
        for name, shape in shapes.items():
            centre, spread = (1.0, 0.1) if len(shape) == 1 else (0.0, 0.5)
            tensor = torch.empty(shape).normal_(centre, spread, generator=generator)
            tensors[f"{prefix}layers.{layer_id}.engram.{name}.weight"] = tensor
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config.get("text_config", config)["engram"] = engram
    (path / "config.json").write_text(json.dumps(config))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with Idefics3's special tokens; any text survives encoding and decoding."""
    tokenizer = train_byte_level([*_SENTENCES, *_WORDS], SPECIAL_TOKENS, VOCAB_SIZE)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _text_values() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.1,  # five times the usual: logits far enough apart that greedy texts vary
        "bos_token_id": SPECIAL_TOKENS.index("<|im_start|>"),
        "eos_token_id": SPECIAL_TOKENS.index("<|im_end|>"),
        "pad_token_id": SPECIAL_TOKENS.index("<|im_end|>"),
    }


def _save(model_class: Any, config: Any, path: Path, seed: int, max_shard_size: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
        for name, parameter in model.named_parameters():  # norms and biases that are not their defaults
            if parameter.ndim == 1:
                centre = 1.0 if name.endswith("weight") else 0.0
                parameter.data.normal_(centre, 0.1)
    model.save_pretrained(path, max_shard_size=max_shard_size)
