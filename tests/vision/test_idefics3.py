"""Expansions and tensors equal to those of the Hugging Face processor of the same checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from airside.vision_workers.families.family import Family, UnsupportedModel
from airside.vision_workers.families.registry import load_family
from tests.checkpoints import load_processor
from tests.vision.family_cases import PICTURES, Reference, assert_equal_to, assert_equal_together, changed, picture


@pytest.fixture(scope="module", params=["splitting", "single_tile"])
def checkpoint(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue(f"{request.param}_checkpoint")
    return folder


@pytest.fixture(scope="module")
def family(checkpoint: Path) -> Family:
    return load_family(str(checkpoint))


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return reference_of(checkpoint)


def reference_of(checkpoint: Path) -> Reference:
    """Of a checkpoint that has nothing but what is said about pictures."""
    return Reference(load_processor(checkpoint), "<image>", prompt_axis=True, mark_text=("", ""))


@pytest.mark.parametrize(("kind", "width", "height"), PICTURES)
def test_equals_the_reference(family: Family, reference: Reference, kind: str, width: int, height: int) -> None:
    assert_equal_to(reference, family, picture(kind, width, height))


def test_pictures_of_one_prompt_can_be_processed_one_by_one(family: Family, reference: Reference) -> None:
    assert_equal_together(
        reference, family, [picture("noise", 30, 20), picture("photo", 640, 480), picture("drawing", 20, 90)]
    )


def test_pictures_of_several_prompts_too(family: Family, reference: Reference) -> None:
    """The reference pads the batch with tiles of zeros, and only behind a prompt's own tiles."""
    pictures = [picture("noise", 30, 20), picture("noise", 640, 480), picture("noise", 20, 90)]
    alone = [family.process(image) for image in pictures]
    together = reference.processor(
        text=["<image><image>", "<image>"], images=[pictures[:2], pictures[2:]], return_tensors="np"
    )
    prompts = [alone[:2], alone[2:]]
    for prompt, pixels, masks in zip(prompts, together["pixel_values"], together["pixel_attention_mask"], strict=True):
        own_pixels = np.concatenate([tensors["pixel_values"] for tensors in prompt])
        own_masks = np.concatenate([tensors["pixel_attention_mask"] for tensors in prompt])
        assert np.array_equal(pixels[: len(own_pixels)], own_pixels)
        assert np.array_equal(masks[: len(own_masks)], own_masks)
        assert not pixels[len(own_pixels) :].any()
        assert not masks[len(own_masks) :].any()


@pytest.mark.parametrize(
    ("width", "height"),
    [pytest.param(4000, 3000, marks=pytest.mark.slow), (1024, 768), (900, 2700), (2048, 1536), (300, 5000)],
)
def test_large_tiles_equal_the_reference(splitting_checkpoint: Path, tmp_path: Path, width: int, height: int) -> None:
    """At SmolVLM's own sizes: up to 2048 pixels, in tiles of 512."""
    values = {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}
    told = {"image_processor": values, "image_seq_len": (512 // 8) ** 2 // 2**2}
    folder = changed(splitting_checkpoint, tmp_path, "processor_config.json", **told)
    assert_equal_to(reference_of(folder), load_family(str(folder)), picture("photo", width, height))


def test_splitting_makes_tiles_and_marks(splitting_checkpoint: Path) -> None:
    """Guards the comparisons above against a reference that does not split either."""
    family = load_family(str(splitting_checkpoint))
    tensors = family.process(picture("noise", 640, 480))
    assert tensors["pixel_attention_mask"].dtype == np.uint8
    num_tiles = len(tensors["pixel_values"])
    assert num_tiles == 4 * 3 + 1
    image_id = json.loads((splitting_checkpoint / "config.json").read_text())["image_token_id"]
    assert np.count_nonzero(family.shape(640, 480).expansion == image_id) == 4 * num_tiles


@pytest.mark.parametrize(
    ("file", "values", "told"),
    [
        ("config.json", {"model_type": "llama", "image_token_id": None}, "not supported"),
        ("config.json", {"image_token_id": 1}, "config.json says"),
        ("processor_config.json", {"image_seq_len": 7}, "image_seq_len 7"),
        ("tokenizer.json", {"added_tokens": []}, "<image>"),
    ],
)
def test_a_checkpoint_that_cannot_work_says_why(
    single_tile_checkpoint: Path, tmp_path: Path, file: str, values: dict[str, Any], told: str
) -> None:
    with pytest.raises(UnsupportedModel, match=told):
        load_family(str(changed(single_tile_checkpoint, tmp_path, file, **values)))


def test_a_text_model_takes_no_pictures(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UnsupportedModel, match="text-only"):
        load_family(str(tmp_path))
    with pytest.raises(UnsupportedModel, match="no checkpoint folder"):
        load_family(str(tmp_path / "nowhere"))


def test_the_older_layout_of_files_works_too(single_tile_checkpoint: Path, tmp_path: Path) -> None:
    """The image processor's values in preprocessor_config.json, processor_config.json with the rest."""
    shutil.copytree(single_tile_checkpoint, tmp_path, dirs_exist_ok=True)
    whole = json.loads((tmp_path / "processor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(whole.pop("image_processor")))
    (tmp_path / "processor_config.json").write_text(json.dumps(whole))
    family = load_family(str(tmp_path))
    expected = load_family(str(single_tile_checkpoint))
    assert np.array_equal(family.shape(70, 50).expansion, expected.shape(70, 50).expansion)
    image = picture("photo", 70, 50)
    assert np.array_equal(family.process(image)["pixel_values"], expected.process(image)["pixel_values"])
