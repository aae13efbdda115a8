"""From a decoded picture to a vision tower's numbers: what Pillow and numpy would make, bit for bit, in less time.

For families, in place of the resizing, rescaling and normalising of their reference processor:

    pixels = pixels_of(image)                                # [height, width, 3 or 4], not a copy
    pixels = resize(pixels, 448, 336, processor.resample)    # [336, 448, 3], as Image.resize
    tile = pixels[top:bottom, left:right]                    # cropping and tiling is slicing
    out = np.empty((3, *tile.shape[:2]), np.float32)
    spread(tile, levels, out)                                # levels = levels_of(processor), once per process

A processor works on bytes up to its last resize, so that its rescaling and normalising are a function of 256 values and
the colour. `levels_of` asks the processor itself for that function: its roundings are kept, whatever they are.
"""

from __future__ import annotations

import functools
import logging
from enum import Enum
from typing import Any

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image

from airside import _pixels

log = logging.getLogger(__name__)

_FILTERS = {
    Image.Resampling.BILINEAR: "bilinear",
    Image.Resampling.BICUBIC: "bicubic",
    Image.Resampling.LANCZOS: "lanczos",
}


class _Order(Enum):
    """Which of a resize's two convolutions goes first, which changes the last bits. None of it is documented."""

    ROWS = "Pillow up to 12"
    COLUMNS_THAT_SHRINK_MORE = "Pillow 13"

    def columns_first(self, width: int, height: int, new_width: int, new_height: int) -> bool:
        """In Pillow 13, when that takes away more rows than twice the columns that the other order would."""
        shrinks_more = height - new_height > max(0, 2 * (width - new_width))
        return self is _Order.COLUMNS_THAT_SHRINK_MORE and shrinks_more


_TRIALS = [
    *[(64, 64, 40, 17), (64, 64, 40, 15), (64, 64, 64, 40), (64, 64, 90, 63), (64, 64, 90, 64), (40, 20, 41, 30)],
    *[(20, 40, 20, 90), (20, 40, 10, 20), (20, 40, 10, 19), (7, 90, 3, 81), (90, 7, 30, 3), (33, 21, 66, 42)],
]  # width and height before and after, on both sides of where Pillow 13 changes the order

# Pillow keeps pictures of more than a block in pieces, which cannot be looked at without a copy. A block is no larger
# than its picture needs.
_BLOCK_BYTES = 1 << 30
Image.core.set_block_size(_BLOCK_BYTES)  # type: ignore[attr-defined]  # the one way but the environment

_HUGE_PIXELS = 1 << 20  # a few huge pages, at four bytes each


def pixels_of(image: Image.Image) -> NDArray[np.uint8]:
    """The pixels of an RGB picture, read-only.

    Returns: [height, width, 4], whose fourth channel means nothing, over the picture's own memory, which it keeps; or
        [height, width, 3], a copy, where Pillow has no such view.
    """
    assert image.mode == "RGB", f"a picture of mode {image.mode}"
    try:
        array: Any = image.__arrow_c_array__()[1]  # Any: a capsule, for which Python has no type
    except ValueError:  # in pieces: made before this module was imported, or larger than a block
        return np.asarray(image)
    return _pixels.arrow_pixels(array, image.height, image.width)


def expect_pixels(image: Image.Image) -> None:
    """Prepares the memory that an opened RGB picture is about to be decoded into. Changes no pixel.

    Most of the time of a large JPEG would go into one page fault per 4096 bytes of it.
    """
    prepare = getattr(image, "load_prepare", None)
    if image.mode != "RGB" or image.width * image.height < _HUGE_PIXELS or prepare is None:
        return
    prepare()
    _pixels.prefer_huge_pages(image.im.__arrow_c_array__())


def resize(pixels: NDArray[np.uint8], width: int, height: int, resample: int | None) -> NDArray[np.uint8]:
    """Pillow's `Image.resize((width, height), resample)`, byte for byte. Releases the GIL.

    Args:
        pixels: [h, w, 3 or 4], also a part of a larger picture; a fourth channel is not looked at.
        resample: one of Image.Resampling; None: bilinear, as for transformers.
    Returns: [height, width, 3], or `pixels` themselves when they have that size.
    """
    if pixels.shape[:2] == (height, width):
        return pixels
    wanted = Image.Resampling.BILINEAR if resample is None else Image.Resampling(resample)
    name, order = _FILTERS.get(wanted), _pillows_order()
    if name is None or order is None:
        return _resize_by_pillow(pixels, width, height, wanted)
    columns_first = order.columns_first(pixels.shape[1], pixels.shape[0], width, height)
    return _resize(pixels, width, height, name, columns_first)


def _resize(pixels: NDArray[np.uint8], width: int, height: int, name: str, columns_first: bool) -> NDArray[np.uint8]:
    out = np.empty((height, width, 3), dtype=np.uint8)
    _pixels.resize(pixels, name, columns_first, out)
    return out


def _resize_by_pillow(
    pixels: NDArray[np.uint8], width: int, height: int, resample: Image.Resampling
) -> NDArray[np.uint8]:
    rgb = np.ascontiguousarray(pixels[:, :, :3])
    return np.asarray(Image.fromarray(rgb).resize((width, height), resample))


@functools.cache
def _pillows_order() -> _Order | None:
    """The installed Pillow's, found out by trying; None: it resizes as no Pillow that is known here."""
    for order in _Order:
        if all(_agrees(order, sizes, resample) for sizes in _TRIALS for resample in _FILTERS):
            return order
    log.warning("Pillow %s resizes in a way that is not known here: its own, slower resize is used", PIL.__version__)
    return None


def _agrees(order: _Order, sizes: tuple[int, int, int, int], resample: Image.Resampling) -> bool:
    width, height, new_width, new_height = sizes
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    ours = _resize(pixels, new_width, new_height, _FILTERS[resample], order.columns_first(*sizes))
    return np.array_equal(ours, _resize_by_pillow(pixels, new_width, new_height, resample))


def spread(pixels: NDArray[np.uint8], levels: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """Writes `levels[c, pixels[y, x, c]]` to `out[c, y, x]`. Releases the GIL.

    Args:
        pixels: [height, width, 3 or 4], also a part of a larger picture.
        levels: [3, 256], of `levels_of`.
        out: [3, height, width], also a part of a larger array, as long as a row lies in one piece.
    """
    _pixels.spread(pixels, levels, out)


def levels_of(processor: Any) -> NDArray[np.float32]:  # Any: transformers is not typed
    """What a processor of transformers' Pillow backend makes of each byte, by colour.

    Returns: [3, 256], of `do_rescale`, `rescale_factor`, `do_normalize`, `image_mean` and `image_std`.
    """
    values: NDArray[Any] = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(16, 16), (3, 16, 16))
    if processor.do_rescale:
        values = processor.rescale(values, processor.rescale_factor)
    if processor.do_normalize:
        values = processor.normalize(values, processor.image_mean, processor.image_std)
    return np.ascontiguousarray(values.reshape(3, 256), dtype=np.float32)
