"""Qwen2.5-VL (Bai et al. 2025, arXiv 2502.13923), with the image processor of Qwen2-VL."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from airside.proto.image_content import PixelRange
from airside.vision_workers.families.family import ImageShape, UnsupportedModel
from airside.vision_workers.families.image_processor import load_image_processor
from airside.vision_workers.image_error import Cause, ImageError
from airside.vision_workers.pixels import levels_of, pixels_of, resize, spread

_IMAGE_TOKEN_ID_DEFAULT = 151_655  # of Qwen2_5_VLConfig

_VISION_DEFAULTS = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}  # of its vision_config

_PROCESSOR = "Qwen2VLImageProcessorPil"

_ASPECT_MAX = 200  # the reference processor refuses more


class Qwen25VL:
    """The checkpoint's own image processor; `<|image_pad|>` becomes an image token per square of patches.

    A picture keeps its shape: both sides become the nearest multiples of a token's side, unless it then has fewer
    pixels than the processor's `min_pixels`, or more than its `max_pixels`, and is scaled to that. Positions go on over
    it by the longer side of its grid of tokens.
    """

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self._processor = load_image_processor(folder)
        _check_patches(self._processor, config)
        self._merge_size = int(self._processor.merge_size)
        self._side = int(self._processor.patch_size) * self._merge_size  # of a token, in pixels
        self._levels = levels_of(self._processor)
        size = self._processor.size
        if not self._processor.do_resize or not size.shortest_edge or not size.longest_edge:
            raise UnsupportedModel(
                f"the image processor of {folder} must resize pictures to between min_pixels and max_pixels"
            )
        self._pixels_min, self._pixels_max = int(size.shortest_edge), int(size.longest_edge)
        self._token_id = int(config.get("image_token_id", _IMAGE_TOKEN_ID_DEFAULT))

    def within(self, pixels: PixelRange) -> Self:
        """As `ScalingFamily.within`. Raises ImageError for more than the checkpoint's own `max_pixels`."""
        if max(pixels) > self._pixels_max:
            given = " and ".join(f"{name} is {value}" for name, value in pixels._asdict().items() if value)
            raise ImageError(Cause.BAD_PIXEL_RANGE, f"{given}; the checkpoint allows up to {self._pixels_max}")
        other = copy.copy(self)
        other._pixels_max = pixels.max_pixels or self._pixels_max
        other._pixels_min = pixels.min_pixels or min(self._pixels_min, other._pixels_max)
        return other

    def shape(self, width: int, height: int) -> ImageShape:
        """As `Family.shape`: image tokens alone."""
        rows, columns = self._grid(width, height)
        return ImageShape(np.full(rows * columns, self._token_id, dtype=np.int32), rope_advance=max(rows, columns))

    def process(self, image: Image.Image) -> dict[str, NDArray[Any]]:
        """As `Family.process`.

        Returns:
            pixel_values: [num_patches, channels * temporal_patch_size * patch_size**2] float32, square by square of
                the patches that become one token.
            image_grid_thw: [1, 3] int64; frames (one), rows and columns of patches.
        """
        rows, columns = self._grid(*image.size)
        values = np.empty((3, rows * self._side, columns * self._side), dtype=np.float32)
        scaled = resize(pixels_of(image), values.shape[2], values.shape[1], self._processor.resample)
        spread(scaled, self._levels, values)
        grid = [1, rows * self._merge_size, columns * self._merge_size]
        return {
            "pixel_values": self._patches(values, rows, columns),
            "image_grid_thw": np.array([grid], dtype=np.int64),
        }

    def _patches(self, values: NDArray[np.float32], rows: int, columns: int) -> NDArray[np.float32]:
        """[3, height, width] -> [num_patches, patch_values]; every frame of a patch is the picture."""
        merge, size = self._merge_size, int(self._processor.patch_size)
        squares = values.reshape(3, rows, merge, size, columns, merge, size).transpose(1, 4, 2, 5, 0, 3, 6)
        frames = int(self._processor.temporal_patch_size)
        patches = np.broadcast_to(squares[:, :, :, :, :, None], (*squares.shape[:5], frames, size, size))
        return np.ascontiguousarray(patches).reshape(rows * columns * merge**2, -1)

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """(rows, columns) of tokens, in the reference's own roundings. Raises ImageError."""
        if max(width, height) > _ASPECT_MAX * min(width, height):
            raise ImageError(
                Cause.TOO_EXTREME_ASPECT,
                f"the picture is {width}x{height} pixels; for this model one side may be {_ASPECT_MAX} times the other",
            )
        side = self._side
        rows, columns = round(height / side), round(width / side)
        if rows * columns * side**2 > self._pixels_max:
            shrink = math.sqrt((height * width) / self._pixels_max)
            rows, columns = (max(1, math.floor(length / shrink / side)) for length in (height, width))
        elif rows * columns * side**2 < self._pixels_min:
            grow = math.sqrt(self._pixels_min / (height * width))
            rows, columns = (math.ceil(length * grow / side) for length in (height, width))
        return rows, columns


def _check_patches(processor: Any, config: dict[str, Any]) -> None:  # Any: a transformers class
    """The vision tower must take the patches that the image processor makes, which must be the one known here."""
    if type(processor).__name__ != _PROCESSOR:
        raise UnsupportedModel(
            f"the image processor is a {type(processor).__name__}; for Qwen2.5-VL, {_PROCESSOR} is supported"
        )
    vision = {**_VISION_DEFAULTS, **(config.get("vision_config") or {})}
    pairs = {
        "patch_size": "patch_size",
        "spatial_merge_size": "merge_size",
        "temporal_patch_size": "temporal_patch_size",
    }
    for of_tower, of_processor in pairs.items():
        made = getattr(processor, of_processor, None)
        if made != vision[of_tower]:
            raise UnsupportedModel(
                f"the image processor has {of_processor} {made}, but config.json has vision_config.{of_tower} "
                f"{vision[of_tower]}"
            )


FAMILIES = {"qwen2_5_vl": Qwen25VL}
