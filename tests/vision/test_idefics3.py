"""Expansions and tensors equal to those of the Hugging Face processor of the same checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer, Idefics3Processor

from airside.vision_workers.families.registry import Family, UnsupportedModel, load_family

SIZES = [
    *[(1, 1), (2, 2), (3, 1), (1, 3), (1, 64), (64, 1), (31, 32), (32, 32), (33, 32), (32, 33)],
    *[(64, 32), (65, 32), (32, 65), (96, 96), (97, 95), (100, 100), (128, 128), (128, 127), (127, 128), (129, 128)],
    *[(257, 27), (27, 257), (200, 150), (150, 200), (640, 480), (480, 640), (333, 111), (111, 334), (800, 4), (4, 800)],
]  # (width, height)


@pytest.fixture(scope="module", params=["splitting", "single_tile"])
def checkpoint(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue(f"{request.param}_checkpoint")
    return folder


@pytest.fixture(scope="module")
def family(checkpoint: Path) -> Family:
    return load_family(str(checkpoint))


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:  # Any: a transformers processor
    image_seq_len = json.loads((checkpoint / "processor_config.json").read_text())["image_seq_len"]
    return Idefics3Processor(
        AutoImageProcessor.from_pretrained(checkpoint, backend="pil"),
        AutoTokenizer.from_pretrained(checkpoint),
        image_seq_len=image_seq_len,
    )


def picture(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_equals_the_reference(family: Family, reference: Any, width: int, height: int) -> None:
    image = picture(width, height)
    expected = reference(text="a<image>b", images=[image], return_tensors="np")
    around = [reference.tokenizer(text, add_special_tokens=False)["input_ids"] for text in "ab"]
    assert [*around[0], *family.shape(width, height), *around[1]] == expected["input_ids"][0].tolist()

    tensors = family.process(image)
    assert tensors["pixel_values"].dtype == np.float32
    assert np.array_equal(tensors["pixel_values"], expected["pixel_values"][0])
    assert tensors["pixel_attention_mask"].dtype == np.uint8
    assert np.array_equal(tensors["pixel_attention_mask"], expected["pixel_attention_mask"][0])


def test_pictures_of_several_sizes_can_be_processed_one_by_one(family: Family, reference: Any) -> None:
    """The reference pads the batch with tiles of zeros, and only behind a prompt's own tiles."""
    pictures = [picture(30, 20), picture(640, 480), picture(20, 90)]
    alone = [family.process(image) for image in pictures]
    together = reference(text=["<image><image>", "<image>"], images=[pictures[:2], pictures[2:]], return_tensors="np")
    prompts = [alone[:2], alone[2:]]
    for prompt, pixels, masks in zip(prompts, together["pixel_values"], together["pixel_attention_mask"], strict=True):
        own_pixels = np.concatenate([tensors["pixel_values"] for tensors in prompt])
        own_masks = np.concatenate([tensors["pixel_attention_mask"] for tensors in prompt])
        assert np.array_equal(pixels[: len(own_pixels)], own_pixels)
        assert np.array_equal(masks[: len(own_masks)], own_masks)
        assert not pixels[len(own_pixels) :].any()
        assert not masks[len(own_masks) :].any()


def test_splitting_makes_tiles_and_marks(splitting_checkpoint: Path) -> None:
    """Guards the comparisons above against a reference that does not split either."""
    family = load_family(str(splitting_checkpoint))
    num_tiles = len(family.process(picture(640, 480))["pixel_values"])
    assert num_tiles == 4 * 3 + 1
    image_id = json.loads((splitting_checkpoint / "config.json").read_text())["image_token_id"]
    assert np.count_nonzero(family.shape(640, 480) == image_id) == 4 * num_tiles


def changed(checkpoint: Path, folder: Path, file: str, **values: Any) -> str:
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return str(folder)


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
        load_family(changed(single_tile_checkpoint, tmp_path, file, **values))


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
    assert np.array_equal(family.shape(70, 50), expected.shape(70, 50))
    image = picture(70, 50)
    assert np.array_equal(family.process(image)["pixel_values"], expected.process(image)["pixel_values"])
