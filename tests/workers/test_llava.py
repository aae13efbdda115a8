"""LLaVA against transformers: towers, layers, strategies, and the tensor names of different releases."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from airside.workers.model_config import CheckpointError, load_model_config
from airside.workers.model_configs.llava import LlavaVisionConfig
from airside.workers.models.llava import LlavaForConditionalGeneration
from airside.workers.parallel import RankGroup
from airside.workers.weights.safetensors_files import SafetensorsFiles
from tests.checkpoints import make_llava
from tests.workers.pictures import expected_tokens, generate, make_prompt, picture, runner_for

VARIANTS: dict[str, dict[str, Any]] = {
    "clip-llama": {},
    "siglip-qwen2": {"tower": "siglip", "text": "qwen2", "tie_word_embeddings": True},
    "full": {"vision_feature_select_strategy": "full", "multimodal_projector_bias": False},
    "first-layer": {"vision_feature_layer": 1, "projector_hidden_act": "gelu_pytorch_tanh"},
    "layers": {"vision_feature_layer": [-1, 0, 2]},
    "siglip-default": {"tower": "siglip", "vision_feature_layer": -3, "vision_feature_select_strategy": "default"},
}


def load(path: Path) -> LlavaForConditionalGeneration:
    weights = SafetensorsFiles(path, torch.float32, torch.device("cpu"))
    return LlavaForConditionalGeneration(load_model_config(path), weights, RankGroup(0, 1), 64)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llava(tmp_path_factory.mktemp("clip"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_pictures_are_encoded_as_transformers_does(variant: str, tmp_path: Path) -> None:
    path = make_llava(tmp_path, **VARIANTS[variant])
    model = AutoModelForImageTextToText.from_pretrained(path)
    ours = load(path)
    for seed in range(2):
        values = torch.randn((1, 3, 32, 32), generator=torch.Generator().manual_seed(seed))
        with torch.inference_mode():
            expected = model.model.get_image_features(values).pooler_output[0]
            found = ours.encode_image({"pixel_values": values})
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk", [5, 512])
@pytest.mark.parametrize("variant", ["clip-llama", "siglip-qwen2"])
def test_pictures_and_text_make_the_tokens_of_transformers(variant: str, chunk: int, tmp_path: Path) -> None:
    path = make_llava(tmp_path / "model", **VARIANTS[variant])
    prompts = [
        make_prompt(path, tmp_path, "<image>What is it?<image>", [picture(60, 20, 1), picture(40, 100, 2)], "a"),
        make_prompt(path, tmp_path, "The <image> is", [picture(16, 16, 3)], "b"),
        make_prompt(path, tmp_path, "The red circle", [], "c"),
    ]
    made = generate(runner_for(path, tmp_path), prompts, chunk)
    assert made == [expected_tokens(path, prompt) for prompt in prompts]


RELEASES = {
    "with vision_model": [("vision_tower.", "vision_tower.vision_model.")],
    "model in front": [
        ("language_model.lm_head.", "lm_head."),
        ("language_model.model.", "model.language_model."),
        ("vision_tower.", "model.vision_tower."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
    ],
    "both": [
        ("language_model.lm_head.", "lm_head."),
        ("language_model.model.", "model.language_model."),
        ("vision_tower.", "model.vision_tower.vision_model."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
    ],
}


@pytest.mark.parametrize("release", RELEASES)
def test_tensors_may_have_the_names_of_another_release(release: str, clip: Path, tmp_path: Path) -> None:
    shutil.copytree(clip, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    for old, new in RELEASES[release]:
        assert any(name.startswith(old) for name in tensors), old
        tensors = {new + name.removeprefix(old) if name.startswith(old) else name: t for name, t in tensors.items()}
    save_file(tensors, file, {"format": "pt"})
    prompts = [make_prompt(clip, tmp_path, "The <image> is", [picture(16, 16, 3)], "b")]
    assert generate(runner_for(file.parent, tmp_path), prompts, 512) == [expected_tokens(clip, prompts[0])]


def test_layers_behind_the_one_that_is_used_may_be_missing(clip: Path, tmp_path: Path) -> None:
    shutil.copytree(clip, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "encoder.layers.2." not in name}
    assert len(kept) < len(tensors)
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    values = {"pixel_values": torch.ones((1, 3, 32, 32))}
    with torch.inference_mode():
        assert torch.equal(load(tmp_path).encode_image(values), load(clip).encode_image(values))


def test_a_picture_of_another_size_is_refused(clip: Path) -> None:
    with pytest.raises(ValueError, match=r"a picture of \(40, 32\) pixels, for a tower that takes \(32, 32\)"):
        load(clip).encode_image({"pixel_values": torch.ones((1, 3, 40, 32))})


LLAVA_1_5 = {
    "architectures": ["LlavaForConditionalGeneration"],
    "image_token_index": 32000,
    "model_type": "llava",
    "pad_token_id": 32001,
    "projector_hidden_act": "gelu",
    "text_config": {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "torch_dtype": "float16",
        "vocab_size": 32064,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "vocab_size": 32064,
}
"""As the 7B checkpoint of LLaVA 1.5 has it: what is a Llama's default is not said."""


def write(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**LLAVA_1_5, **changes}))
    return folder


def test_what_a_config_leaves_out_is_as_in_transformers(tmp_path: Path) -> None:
    config = load_model_config(write(tmp_path))
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (4096, 11008, 32)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 32, 128)
    assert (config.vocab_size, config.max_position_embeddings, config.rms_norm_eps) == (32064, 4096, 1e-5)
    assert (config.image_token_id, config.dtype, config.tie_word_embeddings) == (32000, "float16", False)
    vision = config.vision
    assert isinstance(vision, LlavaVisionConfig)
    assert (vision.states, vision.drops_first_token, vision.has_class_token) == ((23,), True, True)
    assert (vision.hidden_act, vision.layer_norm_eps, vision.projector_bias) == ("quick_gelu", 1e-5, True)

    none = load_model_config(write(tmp_path, vision_config=None)).vision
    assert none == vision
    siglip = load_model_config(write(tmp_path, vision_config={"model_type": "siglip_vision_model"})).vision
    assert isinstance(siglip, LlavaVisionConfig)
    assert (siglip.hidden_size, siglip.patch_size, siglip.hidden_act) == (768, 16, "gelu_pytorch_tanh")
    assert (siglip.states, siglip.has_class_token, siglip.layer_norm_eps) == ((11,), False, 1e-6)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"text_config": {"model_type": "mistral"}},
            "text model of type mistral is not supported; supported: llama",
        ),
        (
            {"vision_config": {"model_type": "pixtral"}},
            "tower of type pixtral is not supported; supported: clip",
        ),
        ({"vision_feature_select_strategy": "cls"}, "strategy cls is not default or full"),
        ({"vision_feature_layer": 25}, "vision_feature_layer 25 is not among the 24 layers"),
        ({"vision_feature_layer": [-2, -26]}, r"vision_feature_layer \[-2, -26\] is not among"),
        ({"vision_feature_layer": []}, r"vision_feature_layer \[\] is not among"),
        ({"vision_config": {"image_size": [336, 224]}}, "image_size .* is not supported; one number is"),
        ({"vision_config": {"num_attention_heads": 7}}, "7 attention heads do not divide vision hidden_size 768"),
    ],
)
def test_a_config_that_is_not_supported_says_why(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        load_model_config(write(tmp_path, **changes))


@pytest.mark.parametrize("place", ["projector", "tower"])
def test_an_activation_that_is_not_known_says_which_key(place: str, tmp_path: Path, clip: Path) -> None:
    shutil.copytree(clip, tmp_path, dirs_exist_ok=True)
    config = json.loads((clip / "config.json").read_text())
    key = "projector_hidden_act" if place == "projector" else "hidden_act"
    (config if place == "projector" else config["vision_config"])[key] = "mish"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"{key} mish is not supported; supported: gelu"):
        load(tmp_path)
