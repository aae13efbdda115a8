"""Reading configs, old style and new; refusing what cannot be served."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from airside.workers.layers import inverse_frequencies
from airside.workers.model_config import (
    CheckpointError,
    TensorParallelSizeError,
    check_tensor_parallel_size,
    load_model_config,
    tensor_parallel_sizes,
)
from airside.workers.model_configs.registry import SUPPORTED_ARCHITECTURES
from airside.workers.models.registry import MODELS

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 2048,
}


def write(folder: Path, config: dict[str, Any], name: str = "config.json") -> Path:
    (folder / name).write_text(json.dumps(config))
    return folder


def test_a_llama_config(tmp_path: Path) -> None:
    config = load_model_config(write(tmp_path, LLAMA))
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert config.rope.theta == 10_000.0
    assert config.eos_token_ids == (2,)
    assert config.image_token_id is None
    assert not config.tie_word_embeddings


def test_an_idefics3_config(idefics3_path: Path) -> None:
    config = load_model_config(idefics3_path)
    assert config.image_token_id == 3
    assert config.vision is not None
    assert (config.vision.patch_size, config.vision.image_size, config.vision.scale_factor) == (8, 32, 2)
    assert config.tie_word_embeddings
    assert config.dtype == "float32"


def test_the_generation_config_names_the_end_tokens(tmp_path: Path) -> None:
    write(tmp_path, {"eos_token_id": [5, 6]}, "generation_config.json")
    assert load_model_config(write(tmp_path, LLAMA)).eos_token_ids == (5, 6)


@pytest.mark.parametrize("style", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("values", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}, LLAMA3_ROPE])
def test_rotary_frequencies_are_those_of_transformers(tmp_path: Path, style: str, values: dict[str, Any]) -> None:
    rope: dict[str, Any] = {"rope_parameters": {**values, "rope_theta": 5e5}}
    if style == "rope_scaling":
        rope = {"rope_scaling": values, "rope_theta": 5e5}
    config = load_model_config(write(tmp_path, {**LLAMA, **rope}))
    reference = LlamaRotaryEmbedding(LlamaConfig(**{**LLAMA, "rope_parameters": {**values, "rope_theta": 5e5}}))
    assert torch.equal(inverse_frequencies(config.rope, config.head_dim), reference.inv_freq)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            r"GPT2LMHeadModel is not supported; supported: .*, LlamaForCausalLM, ",
        ),
        ({"architectures": None}, r"\(none named\) is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope type yarn is not supported; supported: default, linear"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        ({"head_dim": 63}, "head_dim 63 is odd"),
        ({"num_key_value_heads": 4}, "9 attention heads cannot share 4 key-value heads"),
        ({"hidden_act": "gelu"}, "hidden_act gelu is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantized checkpoints are not supported"),
    ],
)
def test_what_cannot_be_served_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_model_config(write(tmp_path, {**LLAMA, **change}))


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere/config\.json does not exist"):
        load_model_config(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        load_model_config(tmp_path)
    with pytest.raises(CheckpointError, match="hidden_size is missing"):
        load_model_config(write(tmp_path, {k: v for k, v in LLAMA.items() if k != "hidden_size"}))


def test_tensor_parallel_sizes(tmp_path: Path) -> None:
    config = load_model_config(write(tmp_path, {**LLAMA, "vocab_size": 49155}))  # which 2 does not divide, and 3 does
    assert tensor_parallel_sizes(config) == [1, 3]
    check_tensor_parallel_size(config, 3)
    with pytest.raises(TensorParallelSizeError, match=r"size 2 does not divide .* sizes that work: 1, 3"):
        check_tensor_parallel_size(config, 2)


def test_every_supported_architecture_has_a_model() -> None:
    assert set(MODELS) == set(SUPPORTED_ARCHITECTURES)


def test_reading_a_config_needs_no_torch(idefics3_path: Path) -> None:
    code = (
        "import sys; from airside.workers.model_config import load_model_config;"
        f"load_model_config({str(idefics3_path)!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
