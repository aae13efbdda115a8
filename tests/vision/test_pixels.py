"""Resizing and normalising equal to Pillow's and transformers', bit for bit, on every instruction set."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from airside import _pixels
from airside.vision_workers import pixels as under_test
from airside.vision_workers.decode import decode
from airside.vision_workers.header import FORMATS, ImageLimits
from airside.vision_workers.pixels import levels_of, pixels_of, resize, spread

LIMITS = ImageLimits(max_bytes=64 << 20, max_pixels=64_000_000, max_aspect=200.0)
RESAMPLINGS = list(Image.Resampling)
SIZES = [
    *[((1, 1), (1, 1)), ((1, 1), (50, 40)), ((3, 200), (3, 1)), ((200, 3), (1, 3)), ((31, 33), (32, 31))],
    *[((100, 100), (50, 100)), ((100, 100), (100, 50)), ((100, 100), (90, 79)), ((100, 100), (90, 80))],
    *[((100, 60), (101, 59)), ((100, 60), (101, 60)), ((60, 100), (400, 300)), ((640, 480), (200, 150))],
    *[((17, 1000), (5, 7)), ((1000, 17), (7, 5)), ((333, 257), (128, 96)), ((97, 301), (96, 300))],
]  # (width, height) before and after; some on both sides of where Pillow 13 changes the order of its passes


def noise(width: int, height: int) -> NDArray[np.uint8]:
    """Half of it black and white, which makes resampling overshoot."""
    random = np.random.default_rng(width * 1000 + height)
    gray = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return np.where(random.random((height, width, 1)) < 0.5, gray, np.uint8(255) * (gray > 127)).astype(np.uint8)


@pytest.fixture(params=["baseline", "avx2", "avx512"])
def _isa(request: pytest.FixtureRequest) -> Iterator[None]:
    try:
        _pixels.set_isa(request.param)
    except ValueError:  # this processor's widest is what was tested last
        _pixels.set_isa("baseline")
    yield
    for isa in ("avx512", "avx2", "baseline"):
        try:
            _pixels.set_isa(isa)
        except ValueError:
            continue
        break


@pytest.mark.usefixtures("_isa")
@pytest.mark.parametrize("resample", RESAMPLINGS)
def test_resize_is_pillows(resample: Image.Resampling) -> None:
    for (width, height), size in SIZES:
        original = noise(width, height)
        image = Image.fromarray(original)
        expected = np.asarray(image.resize(size, resample))
        for pixels in (original, pixels_of(image)):
            made = resize(pixels, *size, resample)[:, :, :3]
            assert np.array_equal(made, expected), (width, height, size, pixels.shape)


def test_resize_does_not_fall_back() -> None:
    """Guards the comparison above: Pillow would be compared with itself."""
    assert under_test._pillows_order() is not None


def test_an_unknown_pillow_resizes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "_pillows_order", lambda: None)
    image = Image.fromarray(noise(50, 40))
    made = resize(pixels_of(image), 20, 30, Image.Resampling.BICUBIC)
    assert np.array_equal(made, np.asarray(image.resize((20, 30), Image.Resampling.BICUBIC)))


def test_the_wrong_order_is_noticed() -> None:
    """The trials at the start can tell the orders apart, so that one of them at most is taken for Pillow's."""
    agreeing = [
        order
        for order in under_test._Order
        if all(under_test._agrees(order, sizes, name) for sizes in under_test._TRIALS for name in under_test._FILTERS)
    ]
    assert len(agreeing) == 1


def test_a_part_of_a_picture_is_resized_like_its_copy() -> None:
    whole = noise(90, 70)
    part = whole[11:51, 20:80]
    expected = np.asarray(Image.fromarray(part).resize((33, 25), Image.Resampling.LANCZOS))
    assert np.array_equal(resize(part, 33, 25, Image.Resampling.LANCZOS), expected)


def test_pixels_are_not_copied_and_outlive_the_picture() -> None:
    image = Image.fromarray(noise(2500, 2000))  # 20 MB: more than one of Pillow's usual blocks
    expected = np.asarray(image)
    pixels = pixels_of(image)
    assert pixels.shape == (2000, 2500, 4)
    assert not pixels.flags.writeable
    assert pixels.ctypes.data == pixels_of(image).ctypes.data
    del image
    assert np.array_equal(pixels[:, :, :3], expected)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"do_normalize": False},
        {"do_rescale": False, "do_normalize": False},
        {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]},
        {"rescale_factor": 1 / 127.5},
    ],
)
def test_levels_are_the_processors_arithmetic(changes: dict[str, Any]) -> None:
    processor = SiglipImageProcessorPil(do_resize=False, **changes)
    image = Image.fromarray(noise(60, 50))
    expected = processor(image, return_tensors="np")["pixel_values"][0].astype(np.float32)
    out = np.empty((2, 3, 25, 60), dtype=np.float32)
    for half, rows in enumerate((slice(0, 25), slice(25, 50))):
        spread(pixels_of(image)[rows], levels_of(processor), out[half])
    assert np.array_equal(np.concatenate(out, axis=1), expected)


@pytest.mark.parametrize("image_format", FORMATS)
def test_a_large_picture_is_what_pillow_decodes(image_format: str) -> None:
    """Its memory is prepared before it is decoded, which must change nothing."""
    file = io.BytesIO()
    Image.fromarray(noise(1300, 1000)).save(file, image_format)
    with Image.open(io.BytesIO(file.getvalue())) as plain:
        expected = np.asarray(plain.convert("RGB"))
    decoded = decode(file.getvalue(), LIMITS, "#ffffff")
    assert np.array_equal(np.asarray(decoded), expected)
    assert np.array_equal(pixels_of(decoded)[:, :, :3], expected)


@pytest.mark.parametrize(
    ("pixels", "out", "told"),
    [
        (np.zeros((4, 4, 2), np.uint8), (2, 2, 3), "3 or 4"),
        (np.zeros((0, 4, 3), np.uint8), (2, 2, 3), "empty"),
        (np.zeros((4, 8, 3), np.uint8)[:, ::2], (2, 2, 3), "side by side"),
        (np.zeros((4, 4, 3), np.uint8), (0, 2, 3), "out must not be empty"),
    ],
)
def test_what_cannot_be_resized_is_refused(pixels: NDArray[np.uint8], out: tuple[int, ...], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        _pixels.resize(pixels, "lanczos", False, np.empty(out, np.uint8))
    with pytest.raises(ValueError, match="filter"):
        _pixels.resize(np.zeros((4, 4, 3), np.uint8), "sharp", False, np.empty((2, 2, 3), np.uint8))


def test_planes_of_another_size_are_refused() -> None:
    levels = np.zeros((3, 256), np.float32)
    with pytest.raises(ValueError, match="out must be"):
        spread(np.zeros((4, 5, 3), np.uint8), levels, np.empty((3, 5, 4), np.float32))
    with pytest.raises(ValueError, match="side by side"):
        spread(np.zeros((4, 5, 3), np.uint8), levels, np.empty((3, 4, 10), np.float32)[:, :, ::2])


def test_what_is_no_picture_of_four_bytes_is_not_looked_at() -> None:
    gray = Image.new("L", (4, 4)).im.__arrow_c_array__()
    with pytest.raises(ValueError, match="Arrow"):
        _pixels.arrow_pixels(gray, 4, 4)
    rgb = Image.new("RGB", (4, 4)).im.__arrow_c_array__()
    with pytest.raises(ValueError, match="not as many"):
        _pixels.arrow_pixels(rgb, 5, 4)
