"""Tiny checkpoints with random weights, made by transformers itself, complete with tokenizer and processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoProcessor,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3Processor,
    Gemma3TextConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

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
QWEN_MARK = "<|vision_start|><|image_pad|><|vision_end|>"
"""What a prompt of a Qwen2.5-VL has in a picture's place."""
QWEN_TOKENS = [*SPECIAL_TOKENS[:3], "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
GEMMA_MARK = "<start_of_image>"
"""What a prompt of a Gemma 3 has in a picture's place."""
GEMMA_TOKENS = [*SPECIAL_TOKENS[:3], GEMMA_MARK, "<end_of_image>", "<image_soft_token>"]
GEMMA_IMAGE_TOKENS = 9
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
    config = Idefics3Config(
        text_config=text,
        vision_config={**_tower_values(), "num_hidden_layers": 2},
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


def make_llava(
    path: Path, *, tower: str = "clip", text: str = "llama", seed: int = 0, max_shard_size: str = "1GB", **changes: Any
) -> Path:
    """A LLaVA over a decoder of the Llama's sizes: pictures of 32 pixels in 16 patches, each of which is a token.

    Args:
        path: the folder to write.
        tower: "clip" with its class token taken away ("default"), or "siglip", which has none ("full").
        text: "llama" or "qwen2".
        changes: LlavaConfig values that differ.
    Returns: path, which transformers' AutoProcessor and AutoModelForImageTextToText load.
    """
    values = {
        "image_token_index": IMAGE_TOKEN_ID,
        "image_seq_length": (TILE_PIXELS // 8) ** 2,
        "vision_feature_layer": -2 if tower == "clip" else -1,
        "vision_feature_select_strategy": "default" if tower == "clip" else "full",
        "initializer_range": _text_values()["initializer_range"],
        **changes,
    }
    vision = {**_tower_values(), "model_type": f"{tower}_vision_model", "num_hidden_layers": 3}
    config = LlavaConfig(text_config={**_text_values(), "model_type": text}, vision_config=vision, **values)
    _save(LlavaForConditionalGeneration, config, path, seed, max_shard_size)
    side = {"height": TILE_PIXELS, "width": TILE_PIXELS}
    images = (
        CLIPImageProcessorPil(size={"shortest_edge": TILE_PIXELS}, crop_size=side)
        if tower == "clip"
        else SiglipImageProcessorPil(size=side)
    )
    LlavaProcessor(
        images,
        make_tokenizer(),
        patch_size=vision["patch_size"],
        vision_feature_select_strategy=values["vision_feature_select_strategy"],
        num_additional_image_tokens=int(tower == "clip"),
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(path)
    return path


def make_qwen2(path: Path, *, tied: bool = True, seed: int = 0, max_shard_size: str = "1GB", **changes: Any) -> Path:
    """A Qwen2 of the Llama's sizes; changes are Qwen2Config values that differ. Returns: path."""
    values = {key: value for key, value in _text_values().items() if key != "head_dim"}
    config = Qwen2Config(**{**values, "tie_word_embeddings": tied, **changes})
    _save(Qwen2ForCausalLM, config, path, seed, max_shard_size)
    make_tokenizer().save_pretrained(path)
    return path


def make_qwen2_5_vl(path: Path, *, seed: int = 0, max_shard_size: str = "1GB", **changes: Any) -> Path:
    """A Qwen2.5-VL of the Llama's sizes. A token is 8 x 8 pixels, a window 2 x 2 tokens; pictures have 4 to 64 tokens.

    Args:
        path: the folder to write.
        changes: Qwen2_5_VLConfig values that differ.
    Returns: path, which AutoModelForImageTextToText and `load_processor` load.
    """
    text = {key: value for key, value in _text_values().items() if key != "head_dim"}
    tower = {key: value for key, value in _tower_values().items() if key not in ("num_attention_heads", "image_size")}
    patches = {"patch_size": 4, "temporal_patch_size": 2}
    config = Qwen2_5_VLConfig(
        text_config={
            **text,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        },
        vision_config={
            **tower,
            **patches,
            "depth": 3,
            "num_heads": 3,
            "spatial_merge_size": 2,
            "window_size": 16,
            "out_hidden_size": text["hidden_size"],
            "fullatt_block_indexes": [1],
        },
        **{name.strip("<|>").replace("pad", "token") + "_id": QWEN_TOKENS.index(name) for name in QWEN_TOKENS[5:]},
        vision_start_token_id=QWEN_TOKENS.index("<|vision_start|>"),
        vision_end_token_id=QWEN_TOKENS.index("<|vision_end|>"),
        eos_token_id=text["eos_token_id"],
        initializer_range=text["initializer_range"],
        **changes,
    )
    _save(Qwen2_5_VLForConditionalGeneration, config, path, seed, max_shard_size)
    sizes = {"shortest_edge": 4 * 8 * 8, "longest_edge": 64 * 8 * 8}
    Qwen2VLImageProcessorPil(size=sizes, merge_size=2, **patches).save_pretrained(path)
    make_tokenizer(QWEN_TOKENS, CHAT_TEMPLATE.replace("<image>", QWEN_MARK)).save_pretrained(path)
    return path


def make_gemma3_text(path: Path, *, seed: int = 0, max_shard_size: str = "1GB", **changes: Any) -> Path:
    """A Gemma 3 decoder of the Llama's sizes with three layers, the outer two of which see 8 positions.

    Args:
        path: the folder to write.
        changes: Gemma3TextConfig values that differ.
    Returns: path.
    """
    _save(Gemma3ForCausalLM, Gemma3TextConfig(**{**_gemma3_text_values(), **changes}), path, seed, max_shard_size)
    make_tokenizer().save_pretrained(path)
    return path


def make_gemma3(path: Path, *, tied: bool = False, seed: int = 0, max_shard_size: str = "1GB", **changes: Any) -> Path:
    """A Gemma 3 with pictures of 48 pixels in 36 patches, pooled to 9 tokens: more than the outer layers' window.

    Args:
        path: the folder to write.
        tied: as published ones; then this one, which was never trained, says the same token again and again.
        changes: Gemma3Config values that differ.
    Returns: path, which transformers' AutoProcessor and AutoModelForImageTextToText load.
    """
    names = {"boi_token": GEMMA_MARK, "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = make_tokenizer(GEMMA_TOKENS, CHAT_TEMPLATE.replace("<image>", GEMMA_MARK), names)
    tokenizer.add_tokens(["\n\n", "\n\n\n", "\n\n\n\n"])  # newlines join over what a picture is replaced by
    side = TILE_PIXELS * 3 // 2
    config = Gemma3Config(
        text_config={**_gemma3_text_values(), "vocab_size": len(tokenizer), "tie_word_embeddings": tied},
        vision_config={
            **_tower_values(),
            "model_type": "siglip_vision_model",
            "num_hidden_layers": 3,
            "image_size": side,
        },
        mm_tokens_per_image=GEMMA_IMAGE_TOKENS,
        tie_word_embeddings=tied,
        **{f"{name}_index": GEMMA_TOKENS.index(token) for name, token in names.items()},
        eos_token_id=_text_values()["eos_token_id"],
        initializer_range=_text_values()["initializer_range"],
        **changes,
    )
    _save(Gemma3ForConditionalGeneration, config, path, seed, max_shard_size)
    images = Gemma3ImageProcessorPil(size={"height": side, "width": side})
    Gemma3Processor(images, tokenizer, image_seq_length=GEMMA_IMAGE_TOKENS).save_pretrained(path)
    return path


def _gemma3_text_values() -> dict[str, Any]:
    return {
        **_text_values(),
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 8,
        "query_pre_attn_scalar": 20,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    }


class _Qwen25VLPictures(Qwen2_5_VLProcessor):
    """Without the part for films, which needs torchvision; whoever asks for one finds none."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> type:
        if argument_name == "video_processor":
            return type(None)
        return super().check_argument_for_proper_class(argument_name, argument)


def load_processor(path: Path) -> Any:
    """The checkpoint's processor, with the Pillow backend, as far as it is there without torchvision."""
    if json.loads((path / "config.json").read_text())["model_type"] != "qwen2_5_vl":
        return AutoProcessor.from_pretrained(path, backend="pil")
    images = Qwen2VLImageProcessorPil.from_pretrained(path)
    return _Qwen25VLPictures(images, PreTrainedTokenizerFast.from_pretrained(path), None)


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


def make_tokenizer(
    special_tokens: list[str] = SPECIAL_TOKENS, chat_template: str = CHAT_TEMPLATE, named: dict[str, str] | None = None
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with Idefics3's special tokens; any text survives encoding and decoding.

    Args:
        named: attributes by which transformers finds some of the special tokens.
    """
    tokenizer = train_byte_level([*_SENTENCES, *_WORDS], special_tokens, VOCAB_SIZE)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        extra_special_tokens=named or {},
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


def _tower_values() -> dict[str, Any]:
    return {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_attention_heads": 3,
        "image_size": TILE_PIXELS,
        "patch_size": 8,
        "initializer_range": 0.1,
    }


def _save(model_class: Any, config: Any, path: Path, seed: int, max_shard_size: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
        for name, parameter in model.named_parameters():  # norms and biases that are not their defaults
            if not parameter.any():
                parameter.data.normal_(0.0, 0.1)  # Gemma's norms, whose factor is one more, and what it starts as zeros
            elif parameter.ndim == 1:
                centre = 1.0 if name.endswith("weight") else 0.0
                parameter.data.normal_(centre, 0.1)
    model.save_pretrained(path, max_shard_size=max_shard_size)
