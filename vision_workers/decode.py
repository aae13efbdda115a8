"""The bytes of a picture file to what a careful photo viewer shows: one upright RGB picture."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageColor

from airside.vision_workers.header import FORMATS, ImageLimits, open_checked, read_orientation
from airside.vision_workers.image_error import Cause, ImageError
from airside.vision_workers.picture_file import PictureFile
from airside.vision_workers.pixels import expect_pixels

_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # EXIF orientation -> what makes the picture upright

_GRAY_16 = ("I;16", "I;16L", "I;16B", "I;16N")
_WIDE = ("I", "F")  # 32-bit samples, whose range no header tells


def decode(data: bytes | memoryview, limits: ImageLimits, background: str) -> Image.Image:
    """The picture in mode RGB: EXIF orientation applied, transparency laid over `background`, 16-bit samples scaled.

    Of an animation, the first frame. Colour profiles are not applied, as the reference processors do not either.

    Args:
        data: the whole file.
        limits: checked against the header, before pixels are decoded.
        background: a colour as Pillow names them, e.g. "#ffffff".

    Raises:
        ImageError: the file is not a whole, undamaged picture of an allowed format within the limits.
    """
    image = open_checked(data, limits)
    orientation = read_orientation(image, data)
    try:
        if image.format == "PNG":
            _check_png(data)
        expect_pixels(image)
        image.load()
    except (ImageError, MemoryError):
        raise
    except Exception as error:  # decoders raise whatever a damaged file makes of them
        raise _broken(error) from error
    rgb = _to_rgb(image, background)
    turn = _TRANSPOSE.get(orientation)
    return rgb if turn is None else rgb.transpose(turn)


def _check_png(data: bytes | memoryview) -> None:
    """Raises when a chunk's checksum is wrong: loading pixels does not look at them all."""
    Image.open(PictureFile(data), formats=FORMATS).verify()


def _broken(error: Exception) -> ImageError:
    if isinstance(error, EOFError) or "truncated" in str(error).lower():
        return ImageError(Cause.TRUNCATED, "the file ends before the picture is complete")
    return ImageError(Cause.DAMAGED, f"the picture data is damaged ({type(error).__name__})")


def _to_rgb(image: Image.Image, background: str) -> Image.Image:
    if image.mode in _WIDE:
        raise ImageError(Cause.UNSUPPORTED_FORMAT, "samples of 32 bits are not supported; 8 and 16 bits are")
    if image.mode in _GRAY_16:
        image = _to_gray_8(image)
    try:
        if image.has_transparency_data:
            return _composite(image, background)
        return image if image.mode == "RGB" else image.convert("RGB")  # which would copy it
    except ValueError as error:
        raise ImageError(Cause.UNSUPPORTED_FORMAT, f"pictures of mode {image.mode} are not supported") from error


def _to_gray_8(image: Image.Image) -> Image.Image:
    """The high byte of each sample, which is also what Pillow keeps of 16-bit RGB."""
    samples = np.asarray(image)
    gray = Image.fromarray((samples >> 8).astype(np.uint8))
    hidden = image.info.get("transparency")
    if isinstance(hidden, int):
        gray.putalpha(Image.fromarray(np.where(samples == hidden, 0, 255).astype(np.uint8)))
    return gray


def _composite(image: Image.Image, background: str) -> Image.Image:
    canvas = Image.new("RGBA", image.size, ImageColor.getrgb(background))
    return Image.alpha_composite(canvas, image.convert("RGBA")).convert("RGB")
