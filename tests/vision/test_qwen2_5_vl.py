"""Qwen2.5-VL's expansions, positions and tensors are those of the Hugging Face processor of the same checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from airside.proto.image_content import PixelRange
from airside.vision_workers.families.family import Family, ScalingFamily, UnsupportedModel
from airside.vision_workers.families.registry import load_family
from airside.vision_workers.image_error import Cause, ImageError
from tests.checkpoints import QWEN_MARK, make_qwen2_5_vl
from tests.vision.family_cases import PICTURES, Reference, assert_equal_to, assert_equal_together, picture

MARK = "<|image_pad|>"
PUBLISHED = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 3136,
    "max_pixels": 12_845_056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "processor_class": "Qwen2_5_VLProcessor",
}
"""preprocessor_config.json of the published checkpoints."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen2_5_vl(tmp_path_factory.mktemp("qwen2_5_vl"))


@pytest.fixture(scope="module")
def family(checkpoint: Path) -> Family:
    return load_family(str(checkpoint))


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference.load(checkpoint, MARK)


def with_processor(checkpoint: Path, folder: Path, values: dict[str, Any]) -> Path:
    """A copy of the checkpoint with another preprocessor_config.json; `vision_config` in it is for config.json."""
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"] |= values.pop("vision_config", {})
    (folder / "config.json").write_text(json.dumps(config))
    told = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps({**told, **values}))
    return folder


@pytest.fixture(scope="module")
def published(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the patches and limits of the published checkpoints, by their old names."""
    folder = with_processor(
        checkpoint, tmp_path_factory.mktemp("published"), {"vision_config": {"patch_size": 14, "window_size": 112}}
    )
    (folder / "preprocessor_config.json").write_text(json.dumps(PUBLISHED))
    return folder


@pytest.mark.parametrize(("kind", "width", "height"), PICTURES)
def test_equals_the_reference(family: Family, reference: Reference, kind: str, width: int, height: int) -> None:
    assert_equal_to(reference, family, picture(kind, width, height))


@pytest.mark.parametrize(("kind", "width", "height"), PICTURES)
def test_equals_the_reference_as_published(published: Path, kind: str, width: int, height: int) -> None:
    assert_equal_to(Reference.load(published, MARK), load_family(str(published)), picture(kind, width, height))


def test_pictures_of_one_prompt_can_be_processed_one_by_one(family: Family, reference: Reference) -> None:
    images = [picture("noise", 30, 20), picture("photo", 640, 480), picture("drawing", 20, 90)]
    assert_equal_together(reference, family, images)


@pytest.mark.parametrize("limits", [(4 * 8 * 8, 64 * 8 * 8), (1, 10**9), (1000, 1000)])
def test_grids_of_any_size_are_those_of_the_reference(
    checkpoint: Path, tmp_path: Path, limits: tuple[int, int]
) -> None:
    """Every pair of sides at which roundings may differ; positions go on by the longer side of the grid."""
    size = {"shortest_edge": limits[0], "longest_edge": limits[1]}
    family = load_family(str(with_processor(checkpoint, tmp_path, {"size": size})))
    sides = [1, 3, 4, 5, 7, 8, 11, 12, 13, 20, 28, 63, 64, 65, 100, 123, 256, 300]
    for width, height in ((w, h) for w in sides for h in sides if max(w, h) <= 200 * min(w, h)):
        rows, columns = (side // 8 for side in smart_resize(height, width, 8, *limits))
        shape = family.shape(width, height)
        assert (len(shape.expansion), shape.rope_advance) == (rows * columns, max(rows, columns)), (width, height)


@pytest.mark.parametrize(
    ("asked", "limits"),
    [
        (PixelRange(max_pixels=20 * 64), (2 * 64, 20 * 64)),
        (PixelRange(min_pixels=9 * 64), (9 * 64, 30 * 64)),
        (PixelRange(10 * 64, 12 * 64), (10 * 64, 12 * 64)),
        (PixelRange(max_pixels=64), (64, 64)),  # less than the checkpoint's own min_pixels
    ],
)
def test_a_picture_within_pixels_of_its_own_is_that_of_a_checkpoint_with_these(
    checkpoint: Path, tmp_path: Path, asked: PixelRange, limits: tuple[int, int]
) -> None:
    def with_limits(least: int, most: int) -> Family:
        size = {"shortest_edge": least, "longest_edge": most}
        return load_family(str(with_processor(checkpoint, tmp_path / f"{least}-{most}", {"size": size})))

    usual, expected = with_limits(2 * 64, 30 * 64), with_limits(*limits)
    assert isinstance(usual, ScalingFamily)
    scaled = usual.within(asked)
    for width, height in ((640, 480), (5, 9), (20, 90), (40, 40)):
        image = picture("photo", width, height)
        assert scaled.shape(width, height).expansion.tolist() == expected.shape(width, height).expansion.tolist()
        for name, tensor in expected.process(image).items():
            assert np.array_equal(scaled.process(image)[name], tensor), (name, width, height)
    assert len(usual.shape(640, 480).expansion) == 24, "the family itself is as it was"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (PixelRange(max_pixels=1921), "max_pixels is 1921"),
        (PixelRange(min_pixels=1921), "min_pixels is 1921"),
        (PixelRange(9, 1921), "min_pixels is 9 and max_pixels is 1921"),
    ],
)
def test_more_pixels_than_the_checkpoint_has_are_refused(
    checkpoint: Path, tmp_path: Path, asked: PixelRange, said: str
) -> None:
    size = {"shortest_edge": 128, "longest_edge": 1920}
    family = load_family(str(with_processor(checkpoint, tmp_path, {"size": size})))
    assert isinstance(family, ScalingFamily)
    with pytest.raises(ImageError, match=f": {said}; the checkpoint allows up to 1920$") as raised:
        family.within(asked)
    assert raised.value.cause is Cause.BAD_PIXEL_RANGE


def test_a_picture_too_long_is_its_own_failure(family: Family) -> None:
    assert len(family.shape(800, 4).expansion) > 0
    for size in [(801, 4), (4, 801)]:
        with pytest.raises(ImageError, match="pixels; for this model one side may be 200 times the other") as raised:
            family.shape(*size)
        assert raised.value.cause is Cause.TOO_EXTREME_ASPECT


def test_the_mark_of_a_chat_has_one_image_token(reference: Reference) -> None:
    ids = reference.processor.tokenizer(QWEN_MARK)["input_ids"]
    assert ids.count(reference.processor.tokenizer.convert_tokens_to_ids(MARK)) == 1


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"patch_size": 8}, "has patch_size 8, but config.json has vision_config.patch_size 4"),
        ({"merge_size": 4}, "has merge_size 4, but config.json has vision_config.spatial_merge_size 2"),
        ({"temporal_patch_size": 1}, "has temporal_patch_size 1, but config.json has"),
        ({"do_resize": False}, "must resize pictures"),
        ({"image_processor_type": "NoSuchImageProcessor"}, "has no usable image processor"),
        ({"image_processor_type": "CLIPImageProcessor"}, "is a CLIPImageProcessorPil; for Qwen2.5-VL,"),
    ],
)
def test_a_processor_that_does_not_fit_the_model(
    checkpoint: Path, tmp_path: Path, values: dict[str, Any], told: str
) -> None:
    with pytest.raises(UnsupportedModel, match=told):
        load_family(str(with_processor(checkpoint, tmp_path, values)))
