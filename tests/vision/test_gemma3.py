"""Gemma 3's expansions and tensors are those of the Hugging Face processor of the same checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from airside.vision_workers.families.family import Family, UnsupportedModel
from airside.vision_workers.families.registry import load_family
from tests.checkpoints import GEMMA_IMAGE_TOKENS, GEMMA_MARK, GEMMA_TOKENS, make_gemma3
from tests.vision.family_cases import PICTURES, Reference, assert_equal_to, assert_equal_together, changed, picture


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma3(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def family(checkpoint: Path) -> Family:
    return load_family(str(checkpoint))


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference.load(checkpoint, GEMMA_MARK)


@pytest.mark.parametrize(("kind", "width", "height"), PICTURES)
def test_equals_the_reference(family: Family, reference: Reference, kind: str, width: int, height: int) -> None:
    assert_equal_to(reference, family, picture(kind, width, height))


def test_pictures_of_one_prompt_can_be_processed_one_by_one(family: Family, reference: Reference) -> None:
    assert_equal_together(
        reference, family, [picture("noise", 30, 20), picture("photo", 640, 480), picture("drawing", 20, 90)]
    )


@pytest.mark.parametrize("text", ["{0}", "a\n{0}b", "a\n\n{0}\nb", "{0}{0}", "a {0}\n\n{0}\n"])
def test_newlines_join_with_those_around_a_picture(family: Family, reference: Reference, text: str) -> None:
    """They are tokens of their own by length, so where they meet, ids differ from those of the parts."""
    text = text.format(GEMMA_MARK)
    images = [picture("noise", 8, 8)] * text.count(GEMMA_MARK)
    ids, _ = reference.inputs(text, images)
    assert reference.expanded(text, [family.shape(8, 8).expansion for _ in images]) == ids


def test_every_picture_becomes_the_same_tokens(family: Family) -> None:
    image = GEMMA_TOKENS.index("<image_soft_token>")
    start, end = (GEMMA_TOKENS.index(f"<{side}_of_image>") for side in ("start", "end"))
    for size in [(1, 1), (4000, 30), (48, 48)]:
        assert family.shape(*size).expansion.tolist() == [start, *[image] * GEMMA_IMAGE_TOKENS, end]


def test_the_older_layout_of_files_works_too(checkpoint: Path, family: Family, tmp_path: Path) -> None:
    """The image processor in a file of its own, with the values of pan and scan there, but null."""
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    whole = json.loads((tmp_path / "processor_config.json").read_text())
    nulls = dict.fromkeys(("do_pan_and_scan", "pan_and_scan_max_num_crops", "do_convert_rgb"))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**whole.pop("image_processor"), **nulls}))
    (tmp_path / "processor_config.json").write_text(json.dumps(whole))
    image = picture("photo", 70, 50)
    older = load_family(str(tmp_path))
    assert np.array_equal(older.process(image)["pixel_values"], family.process(image)["pixel_values"])


@pytest.mark.parametrize(
    ("file", "values", "told"),
    [
        ("processor_config.json", {"image_processor": {"do_pan_and_scan": True}}, "set do_pan_and_scan to false"),
        ("processor_config.json", {"image_processor": {"size": {"height": 48, "width": 32}}}, "48x48 pixels"),
        ("processor_config.json", {"image_processor": {"do_resize": False}}, "48x48 pixels"),
        (
            "processor_config.json",
            {"image_processor": {"image_processor_type": "CLIPImageProcessor"}},
            "has the image processor CLIPImageProcessorPil; Gemma 3's pictures need",
        ),
        ("processor_config.json", {"image_seq_length": 256}, "image_seq_length 256, but the model makes 9"),
        ("config.json", {"mm_tokens_per_image": 4}, "image_seq_length 9, but the model makes 4"),
        ("config.json", {"boi_token_index": 9999}, "lacks tokens that config.json names: boi_token 9999"),
    ],
)
def test_a_checkpoint_that_cannot_work_says_why(
    checkpoint: Path, tmp_path: Path, file: str, values: dict[str, Any], told: str
) -> None:
    with pytest.raises(UnsupportedModel, match=told):
        load_family(str(changed(checkpoint, tmp_path, file, **values)))
