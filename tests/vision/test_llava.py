"""LLaVA's expansions and tensors are those of the Hugging Face processor of the same checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from airside.vision_workers.families.family import Family, UnsupportedModel
from airside.vision_workers.families.registry import load_family
from airside.vision_workers.image_error import Cause, ImageError
from tests.checkpoints import make_llava
from tests.vision.family_cases import PICTURES, Reference, assert_equal_to, assert_equal_together, changed, picture

PROCESSORS: dict[str, dict[str, Any]] = {
    "padded to a square": {
        "image_processor_type": "LlavaImageProcessor",
        "do_pad": True,
        "do_center_crop": False,
    },
    "scaled to another size and cut": {
        "size": {"height": 50, "width": 39},
        "resample": 2,
        "image_std": [0.5, 0.4, 0.3],
    },
    "cut out of a larger one": {"size": {"shortest_edge": 41}, "do_normalize": False},
    "smaller than what is cut out": {"size": {"shortest_edge": 24}},
    "not scaled": {"do_resize": False},
}
"""Changes to CLIP's image processor: values that are used as they are, and others that are left to transformers."""
TORCHVISION_ONLY = {"image_processor_type": "Sam2ImageProcessor"}


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llava(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module", params=["clip", "siglip", *PROCESSORS])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, clip: Path) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    match request.param:
        case "clip":
            return clip
        case "siglip":
            return make_llava(path, tower="siglip", text="qwen2")
        case other:
            return changed(clip, path, "processor_config.json", image_processor=PROCESSORS[other])


@pytest.fixture(scope="module")
def family(checkpoint: Path) -> Family:
    return load_family(str(checkpoint))


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference.load(checkpoint)


@pytest.mark.parametrize(("kind", "width", "height"), PICTURES)
def test_equals_the_reference(family: Family, reference: Reference, kind: str, width: int, height: int) -> None:
    assert_equal_to(reference, family, picture(kind, width, height))


def test_pictures_of_one_prompt_can_be_processed_one_by_one(family: Family, reference: Reference) -> None:
    assert_equal_together(
        reference, family, [picture("noise", 30, 20), picture("photo", 640, 480), picture("drawing", 20, 90)]
    )


def test_a_picture_whose_padding_takes_all_memory_is_its_own_failure(clip: Path, tmp_path: Path) -> None:
    """200 times as wide as high, it has few pixels, but its square has not."""
    padding = PROCESSORS["padded to a square"]
    family = load_family(str(changed(clip, tmp_path, "processor_config.json", image_processor=padding)))
    assert len(family.shape(8192, 41).expansion) == 16
    for size in [(8193, 41), (41, 8193)]:
        with pytest.raises(ImageError, match="pads it to a square, so neither side may be more than 8192") as raised:
            family.shape(*size)
        assert raised.value.cause is Cause.TOO_MANY_PIXELS
    assert len(load_family(str(clip)).shape(8193, 41).expansion) == 16


def test_the_strategy_says_whether_the_class_token_counts(clip: Path, tmp_path: Path) -> None:
    assert len(load_family(str(clip)).shape(5, 7).expansion) == 16
    full = make_llava(tmp_path, vision_feature_select_strategy="full")
    assert len(load_family(str(full)).shape(5, 7).expansion) == 17


def test_an_older_checkpoint_leaves_the_count_to_the_model(clip: Path, tmp_path: Path) -> None:
    """The image processor in a file of its own, by its old class name, and no values of the processor."""
    shutil.copytree(clip, tmp_path, dirs_exist_ok=True)
    whole = json.loads((tmp_path / "processor_config.json").read_text())
    old = {**whole["image_processor"], "image_processor_type": "CLIPImageProcessorFast", "crop_size": 32, "size": 32}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(old))
    (tmp_path / "processor_config.json").unlink()
    family, expected = load_family(str(tmp_path)), load_family(str(clip))
    image = picture("photo", 70, 50)
    assert np.array_equal(family.shape(70, 50).expansion, expected.shape(70, 50).expansion)
    assert np.array_equal(family.process(image)["pixel_values"], expected.process(image)["pixel_values"])


@pytest.mark.parametrize(
    ("file", "values", "told"),
    [
        ("processor_config.json", {"patch_size": 16}, "makes 4 image tokens of a picture .* makes 16 embeddings"),
        ("processor_config.json", {"num_additional_image_tokens": 0}, "makes 15 image tokens"),
        ("processor_config.json", {"image_processor": {"do_center_crop": False}}, "pictures of many sizes, .* 32x32"),
        ("processor_config.json", {"image_processor": {"crop_size": {"height": 32, "width": 48}}}, "32x48 pixels, but"),
        (
            "processor_config.json",
            {"image_processor": {"image_processor_type": "SamImageProcessor3"}},
            "no usable image",
        ),
        ("config.json", {"vision_config": {"model_type": "pixtral"}}, "tower of type pixtral are not supported"),
        ("config.json", {"vision_config": {"image_size": 40}}, "32x32 pixels, but the vision tower takes 40x40"),
    ],
)
def test_a_checkpoint_that_cannot_work_says_why(
    clip: Path, tmp_path: Path, file: str, values: dict[str, Any], told: str
) -> None:
    with pytest.raises(UnsupportedModel, match=told):
        load_family(str(changed(clip, tmp_path, file, **values)))


def test_a_processor_that_needs_torchvision_is_refused_with_that_reason(
    clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = changed(clip, tmp_path, "processor_config.json", image_processor=TORCHVISION_ONLY)
    with pytest.raises(UnsupportedModel, match="torchvision"):
        load_family(str(folder))
    # Where torchvision is installed, transformers would fall back on it.
    monkeypatch.setattr("transformers.AutoImageProcessor.from_pretrained", lambda *_, **__: object())
    with pytest.raises(UnsupportedModel, match="works only with torchvision"):
        load_family(str(folder))
