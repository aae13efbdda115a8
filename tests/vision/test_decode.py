"""Every picture of the manifest decodes to its reference or is refused for the right reason."""

from __future__ import annotations

import io
import json
import resource
import struct
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from airside.vision_workers.decode import decode
from airside.vision_workers.header import FORMATS, ImageHeader, ImageLimits, probe
from airside.vision_workers.image_error import Cause, ImageError, attempt
from airside.vision_workers.picture_file import READS_MAX

IMAGES = Path(__file__).parent / "images"
MANIFEST: list[dict[str, Any]] = json.loads((IMAGES / "manifest.json").read_text())
LIMITS = ImageLimits(max_bytes=20 << 20, max_pixels=64_000_000, max_aspect=200.0)
WHITE = "#ffffff"
PIL_REMARKS = pytest.mark.filterwarnings("ignore::UserWarning:PIL")


def rows(key: str) -> list[Any]:
    return [pytest.param(row, id=row["file"]) for row in MANIFEST if key in row]


def saved(image: Image.Image, image_format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, image_format, **options)
    return file.getvalue()


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def refusal(data: bytes, limits: ImageLimits = LIMITS) -> Cause:
    with pytest.raises(ImageError) as caught:
        decode(data, limits, WHITE)
    return caught.value.cause


def png(
    width: int, height: int, depth: int, colour: int, row: bytes, *, before: bytes = b"", after: bytes = b""
) -> bytes:
    """A PNG file of equal rows; `before` and `after` are chunks around the pixel data."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress((b"\0" + row) * height))
    return b"\x89PNG\r\n\x1a\n" + header + before + pixels + after + chunk(b"IEND", b"")


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


@PIL_REMARKS
@pytest.mark.parametrize("row", rows("looks_like"))
def test_looks_like_its_reference(row: dict[str, Any]) -> None:
    data = (IMAGES / row["file"]).read_bytes()
    image = decode(data, LIMITS, WHITE)
    with Image.open(IMAGES / row["looks_like"]) as reference:
        expected = np.asarray(reference.convert("RGB"), dtype=int)
    assert image.mode == "RGB"
    header = probe(data, LIMITS)
    assert (header.width, header.height) == image.size
    assert np.asarray(image).shape == expected.shape
    assert np.abs(np.asarray(image) - expected).max() <= row["levels_off_max"]


@pytest.mark.parametrize("row", rows("cause"))
def test_is_refused_for_its_cause(row: dict[str, Any]) -> None:
    assert refusal((IMAGES / row["file"]).read_bytes()) == row["cause"]


@pytest.mark.parametrize("row", rows("either"))
def test_is_decoded_or_refused(row: dict[str, Any]) -> None:
    data = (IMAGES / row["file"]).read_bytes()
    outcome = attempt(lambda: decode(data, LIMITS, WHITE))
    assert isinstance(outcome, Image.Image) or outcome.cause in row["either"]


def test_manifest_names_every_file() -> None:
    named = {row["file"] for row in MANIFEST} | {row["looks_like"] for row in MANIFEST if "looks_like" in row}
    there = {str(path.relative_to(IMAGES)) for path in IMAGES.rglob("*.*")} - {"manifest.json"}
    assert named == there


@PIL_REMARKS
@pytest.mark.parametrize("image_format", FORMATS)
def test_no_cut_file_is_taken_for_whole(image_format: str) -> None:
    """Cut anywhere before its last pixel data. PNG and GIF end with bytes that say nothing about pixels."""
    data = saved(noise(20, 12), image_format)
    trailer_bytes = {"PNG": 12, "GIF": 2}.get(image_format, 0)
    for length in range(1, len(data) - trailer_bytes):
        assert refusal(data[:length]) in (Cause.TRUNCATED, Cause.DAMAGED), length


@pytest.mark.parametrize("image_format", FORMATS)
def test_limits_are_exact(image_format: str) -> None:
    data = saved(noise(30, 10), image_format)
    exact = ImageLimits(max_bytes=len(data), max_pixels=300, max_aspect=3.0)
    assert probe(data, exact) == ImageHeader(30, 10, image_format)
    assert decode(data, exact, WHITE).size == (30, 10)
    assert refusal(data, ImageLimits(len(data) - 1, 300, 3.0)) == Cause.TOO_MANY_BYTES
    assert refusal(data, ImageLimits(len(data), 299, 3.0)) == Cause.TOO_MANY_PIXELS
    assert refusal(data, ImageLimits(len(data), 300, 2.99)) == Cause.TOO_EXTREME_ASPECT


def test_a_picture_of_just_the_pixel_limit_is_decoded() -> None:
    data = saved(Image.new("1", (8000, 8000), 1), "PNG")
    image = decode(data, LIMITS, WHITE)
    assert (image.size, image.getextrema()) == ((8000, 8000), ((255, 255),) * 3)
    assert refusal(saved(Image.new("1", (8001, 8000)), "PNG")) == Cause.TOO_MANY_PIXELS


def test_a_bomb_takes_no_memory_and_warns_nobody() -> None:
    second_frame = Image.new("RGB", (8, 8))
    webp = bytearray(saved(noise(8, 8), "WEBP", save_all=True, append_images=[second_frame]))
    canvas = webp.index(b"VP8X") + 12
    webp[canvas : canvas + 6] = (16382).to_bytes(3, "little") * 2
    bombs = [bytes(webp), *((IMAGES / row["file"]).read_bytes() for row in MANIFEST if "bomb" in row["file"])]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert {refusal(bomb) for bomb in bombs} == {Cause.TOO_MANY_PIXELS}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("image_format", ["PNG", "WEBP", "TIFF"])
def test_orientation_is_applied_once(image_format: str, orientation: int) -> None:
    original = noise(30, 10)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(original, image_format, exif=exif, **({"lossless": True} if image_format == "WEBP" else {}))
    grid = np.asarray(original)
    upright = {
        1: grid, 2: grid[:, ::-1], 3: grid[::-1, ::-1], 4: grid[::-1],
        5: grid.transpose(1, 0, 2), 6: grid[::-1].transpose(1, 0, 2),
        7: grid[::-1, ::-1].transpose(1, 0, 2), 8: grid[:, ::-1].transpose(1, 0, 2),
    }[orientation]  # fmt: skip
    header = probe(data, LIMITS)
    assert (header.height, header.width) == upright.shape[:2]
    assert np.array_equal(np.asarray(decode(data, LIMITS, WHITE)), upright)


def test_orientation_may_follow_the_pixels_of_a_png() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    late = chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0"))
    data = png(4, 2, 8, 0, bytes(4), after=late)
    assert (probe(data, LIMITS).width, probe(data, LIMITS).height) == (2, 4)
    assert decode(data, LIMITS, WHITE).size == (2, 4)


def test_what_follows_the_end_of_a_png_is_not_walked() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    behind = chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0"))
    data = png(4, 2, 8, 0, bytes(4)) + behind
    assert (probe(data, LIMITS).width, probe(data, LIMITS).height) == (4, 2)


def pieces() -> dict[str, bytes]:
    """Small pictures that a reader must walk in very many steps."""
    jpeg, gif = saved(noise(4, 4), "JPEG"), saved(Image.new("L", (4, 4)), "GIF")
    frame = gif.index(b",", 13)  # the image descriptor, after the header and the colour table of 4 greys at most
    many = READS_MAX
    return {
        "empty PNG chunks": png(4, 4, 8, 0, bytes(4), before=chunk(b"aaAa", b"") * many),
        "PNG chunks behind the pixels": png(4, 4, 8, 0, bytes(4), after=chunk(b"aaAa", b"") * many),
        "JPEG comments": jpeg[:2] + b"\xff\xfe\0\3a" * many + jpeg[2:],
        "JPEG fill bytes": jpeg[:2] + b"\xff" * many + jpeg[2:],
        "a GIF comment": gif[:frame] + b"\x21\xfe" + b"\1a" * many + b"\0" + gif[frame:],
    }


@pytest.mark.parametrize("name", pieces())
def test_a_file_cut_into_pieces_is_refused_after_a_bounded_number_of_reads(name: str) -> None:
    with pytest.raises(ImageError, match="cut into more than") as caught:
        decode(pieces()[name], LIMITS, WHITE)
    assert caught.value.cause is Cause.DAMAGED


def test_a_large_png_in_small_chunks_is_no_such_file() -> None:
    whole = saved(noise(1200, 900), "PNG")
    head, rest = whole[:33], whole[33:]
    pixels = b"".join(body for name, body in png_chunks(rest) if name == b"IDAT")
    small = b"".join(chunk(b"IDAT", pixels[at : at + 1024]) for at in range(0, len(pixels), 1024))
    decoded = decode(head + small + chunk(b"IEND", b""), LIMITS, WHITE)
    assert np.array_equal(np.asarray(decoded), np.asarray(noise(1200, 900)))


def png_chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from(">I", data, at)
        yield data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        at += 12 + size


def test_background_shows_through() -> None:
    clear = saved(Image.new("RGBA", (2, 2), (255, 0, 0, 0)), "PNG")
    assert decode(clear, LIMITS, "#102030").getpixel((0, 0)) == (0x10, 0x20, 0x30)


def test_one_colour_of_a_png_can_be_transparent() -> None:
    gray = png(2, 1, 16, 0, struct.pack(">HH", 1234, 0x4321), before=chunk(b"tRNS", struct.pack(">H", 1234)))
    assert list(np.asarray(decode(gray, LIMITS, WHITE))[0, :, 0]) == [255, 0x43]
    rgb = png(2, 1, 8, 2, bytes([1, 2, 3, 4, 5, 6]), before=chunk(b"tRNS", struct.pack(">HHH", 1, 2, 3)))
    assert decode(rgb, LIMITS, WHITE).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("image_format", ["JPEG", "TIFF"])
def test_cmyk_becomes_rgb(image_format: str) -> None:
    image = decode(saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), image_format), LIMITS, WHITE)
    red, green, blue = np.asarray(image)[4, 4]
    assert red > 240
    assert max(green, blue) < 15


def test_sixteen_bit_gray_is_scaled_not_clipped() -> None:
    ramp = png(3, 1, 16, 0, struct.pack(">HHH", 0, 0x80FF, 0xFFFF))
    assert list(np.asarray(decode(ramp, LIMITS, WHITE))[0, :, 1]) == [0, 0x80, 0xFF]


def test_samples_without_a_known_range_are_refused() -> None:
    assert refusal(saved(Image.new("F", (2, 2)), "TIFF")) == Cause.UNSUPPORTED_FORMAT
