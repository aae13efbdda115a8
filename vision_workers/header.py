"""What a picture's header says, under limits, before any pixel is decoded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from PIL import ExifTags, Image

from airside.vision_workers.image_error import Cause, ImageError
from airside.vision_workers.picture_file import PictureFile

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""The allow-list, in Pillow's names. Everything else, vector formats above all, is refused unread."""

_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF", b"GIF8", b"BM", b"II*\0", b"MM\0*")

_CHUNKS_MAX = 10_000  # of a PNG, that are searched for a late orientation

_UPRIGHT = 1
_TURNED = (5, 6, 7, 8)  # EXIF orientations that swap width and height

# Pillow's own bomb check warns first and refuses at twice its limit; `_check_limits` is exact and takes its place.
Image.MAX_IMAGE_PIXELS = None


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """The largest pictures taken; every limit is inclusive."""

    max_bytes: int
    max_pixels: int
    max_aspect: float  # longer side / shorter side


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """Size in pixels as a viewer shows the picture (EXIF orientation applied), and one of `FORMATS`."""

    width: int
    height: int
    format: str


def probe(data: bytes | memoryview, limits: ImageLimits) -> ImageHeader:
    """Reads the header only: no pixel is decoded and no memory taken, whatever size the header claims.

    Raises:
        ImageError: not a picture of an allowed format, or over a limit.
    """
    return read_header(open_checked(data, limits), data)


def open_checked(data: bytes | memoryview, limits: ImageLimits) -> Image.Image:
    """An opened, not yet decoded picture within the limits. Raises ImageError."""
    if len(data) == 0:
        raise ImageError(Cause.EMPTY, "the picture has no bytes")
    if len(data) > limits.max_bytes:
        raise ImageError(
            Cause.TOO_MANY_BYTES, f"the file has {len(data)} bytes; the limit is {limits.max_bytes} (vision.limits)"
        )
    try:
        image = Image.open(PictureFile(data), formats=FORMATS)
    except (ImageError, MemoryError):
        raise
    except Exception as error:  # plugins raise whatever a damaged file makes of their parser
        raise _unreadable(bytes(data[:16]), len(data)) from error
    _check_limits(image.width, image.height, limits)
    return image


def read_header(image: Image.Image, data: bytes | memoryview) -> ImageHeader:
    """The header of an opened picture; `data` is its whole file."""
    width, height = image.size
    if read_orientation(image, data) in _TURNED:
        width, height = height, width
    # A phone's multi-picture file is a JPEG with more JPEGs behind it.
    return ImageHeader(width, height, "JPEG" if image.format == "MPO" else str(image.format))


def read_orientation(image: Image.Image, data: bytes | memoryview) -> int:
    """EXIF orientation 1 to 8 that is still to be applied; 1 (upright) where there is none or it makes no sense.

    TIFF is always 1: Pillow turns it by itself, its size included.
    """
    if image.format == "TIFF":
        return _UPRIGHT
    if image.format == "PNG" and "exif" not in image.info:
        late = next((body for name, body in _png_chunks(data) if name == b"eXIf"), None)
        if late is not None:
            image.info["exif"] = b"Exif\0\0" + late
    try:
        # The base class's method: PNG's own would decode all pixels in search of a late chunk.
        orientation = Image.Image.getexif(image).get(ExifTags.Base.Orientation, _UPRIGHT)
    except Exception:  # a broken EXIF block says nothing about the pixels: viewers ignore it, and so do we
        return _UPRIGHT
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else _UPRIGHT


def _check_limits(width: int, height: int, limits: ImageLimits) -> None:
    if width < 1 or height < 1:
        raise ImageError(Cause.DAMAGED, f"the header says {width}x{height} pixels")
    if width * height > limits.max_pixels:
        raise ImageError(
            Cause.TOO_MANY_PIXELS,
            f"the picture is {width}x{height} = {width * height} pixels; the limit is {limits.max_pixels} "
            "(vision.limits)",
        )
    longer, shorter = max(width, height), min(width, height)
    if longer > limits.max_aspect * shorter:
        raise ImageError(
            Cause.TOO_EXTREME_ASPECT,
            f"the picture is {width}x{height} pixels; one side may be {limits.max_aspect:g} times the other "
            "(vision.limits)",
        )


def _unreadable(start: bytes, num_bytes: int) -> ImageError:
    """The error for a file that no allowed reader recognised; `start` is its first 16 bytes."""
    if any(signature.startswith(start) for signature in _SIGNATURES):
        return ImageError(Cause.TRUNCATED, f"the file ends after {num_bytes} bytes, inside its signature")
    if start.startswith(b"RIFF"):
        return _unreadable_riff(start, num_bytes)
    if start.startswith(_SIGNATURES):
        return ImageError(Cause.DAMAGED, "the header cannot be read")
    return ImageError(Cause.UNSUPPORTED_FORMAT, f"not a picture in one of the formats {', '.join(FORMATS)}")


def _unreadable_riff(start: bytes, num_bytes: int) -> ImageError:
    """RIFF holds sounds and films as well as WebP: `RIFF`, size of the rest (u32), `WEBP`."""
    if num_bytes >= 12 and start[8:12] != b"WEBP":
        return ImageError(Cause.UNSUPPORTED_FORMAT, "a RIFF file that is no WebP picture")
    if num_bytes < 12 or int.from_bytes(start[4:8], "little") + 8 > num_bytes:
        return ImageError(Cause.TRUNCATED, "the file is shorter than its header says")
    return ImageError(Cause.DAMAGED, "the header cannot be read")


def _png_chunks(data: bytes | memoryview) -> Iterator[tuple[bytes, bytes]]:
    """(name, body) of each chunk except pixel data, up to the last one or one that does not fit into the file."""
    at = 8
    for _ in range(_CHUNKS_MAX):
        if at + 12 > len(data):
            return
        num_bytes = int.from_bytes(data[at : at + 4], "big")
        name, end = bytes(data[at + 4 : at + 8]), at + 12 + num_bytes
        if end > len(data) or name == b"IEND":
            return
        if name != b"IDAT":
            yield name, bytes(data[at + 8 : end - 4])
        at = end
