"""Idefics3 and SmolVLM (Laurençon et al. 2024, arXiv 2408.12637)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from airside.vision_workers.families.family import ImageShape, UnsupportedModel
from airside.vision_workers.families.image_processor import load_image_processor, load_tokenizer, processor_config
from airside.vision_workers.pixels import levels_of, pixels_of, resize, spread

_IMAGE = "<image>"
_FAKE = "<fake_token_around_image>"
_GLOBAL = "<global-img>"

_IMAGE_SEQ_LEN_DEFAULT = 169  # the reference processor's, for checkpoints that do not say
_SIDE_MAX = 4096  # the reference processor never resizes a picture to more than this


class Idefics3:
    """What the checkpoint's own image processor makes of a picture, and its processor of `<image>`.

    A picture becomes square tiles of `max_image_size`: without splitting, one; with splitting, a grid of tiles and,
    when the grid has more than one, the whole picture once more as the last ("global") tile.

    Pictures are processed one by one, while the reference processes those of a prompt together. The result is the
    same: since every tile has the same size, a tile is never padded; the reference only adds whole tiles of zeros to
    prompts with fewer tiles than others, with an attention mask of zeros, which the model drops again. The tiles of
    a prompt's pictures, one picture after the other, are those of the batch.
    """

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self._processor = load_image_processor(folder)
        self._tokenizer = load_tokenizer(folder)
        self._image_seq_len = int(processor_config(folder).get("image_seq_len", _IMAGE_SEQ_LEN_DEFAULT))
        self._levels = levels_of(self._processor)
        self._tile_side = int(self._processor.max_image_size["longest_edge"])
        self._image_token_id = self._token_id(_IMAGE, config)
        self._expansions: dict[tuple[int, int], NDArray[np.int32]] = {}  # by grid, of which there are few
        _check_seq_len(self._image_seq_len, self._tile_side, config)
        self._expand(0, 0)  # refuses a tokenizer without the marks at once

    def shape(self, width: int, height: int) -> ImageShape:
        """As `Family.shape`: marks, and `image_seq_len` image tokens for each tile."""
        return ImageShape(self._expand(*self._grid(width, height)))

    def process(self, image: Image.Image) -> dict[str, NDArray[Any]]:
        """As `Family.process`.

        Returns:
            pixel_values: [num_tiles, 3, side, side] float32.
            pixel_attention_mask: [num_tiles, side, side] uint8; 1 where there is a picture.
        """
        side, (rows, cols) = self._tile_side, self._grid(*image.size)
        pixels = pixels_of(image)
        if self._processor.do_resize:
            pixels = self._resize(pixels, *self._resized(*image.size))
        pixels = self._resize(pixels, side * max(cols, 1), side * max(rows, 1))
        corners = [(row * side, col * side) for row in range(max(rows, 1)) for col in range(max(cols, 1))]
        tiles = [pixels[top : top + side, left : left + side] for top, left in corners]
        if rows:
            tiles.append(self._resize(pixels, side, side))
        pixel_values = np.empty((len(tiles), 3, side, side), dtype=np.float32)
        for tile, out in zip(tiles, pixel_values, strict=True):
            spread(tile, self._levels, out)
        return {
            "pixel_values": pixel_values,
            "pixel_attention_mask": np.ones((len(tiles), side, side), dtype=np.uint8),
        }

    def _resize(self, pixels: NDArray[np.uint8], width: int, height: int) -> NDArray[np.uint8]:
        return resize(pixels, width, height, self._processor.resample)

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """(rows, columns) of the tiles that a picture is split into; (0, 0) when it is not split."""
        if not self._processor.do_image_splitting:
            return 0, 0
        if self._processor.do_resize:
            width, height = self._resized(width, height)
        aspect = width / height
        if width >= height:
            cols = math.ceil(width / self._tile_side)
            rows = math.ceil(int(cols * self._tile_side / aspect) / self._tile_side)
        else:
            rows = math.ceil(height / self._tile_side)
            cols = math.ceil(int(rows * self._tile_side * aspect) / self._tile_side)
        return (rows, cols) if rows > 1 or cols > 1 else (0, 0)

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        """Size after the first resize, in the reference's own roundings."""
        size = self._processor.size
        if not size.longest_edge:
            return size.width, size.height
        width, height = _with_longer_side(width, height, size.longest_edge, even=True)
        if max(width, height) > _SIDE_MAX:
            width, height = _with_longer_side(width, height, _SIDE_MAX, even=False)
        return width, height

    def _expand(self, rows: int, cols: int) -> NDArray[np.int32]:
        known = self._expansions.get((rows, cols))
        if known is not None:
            return known
        ids = self._tokenizer.encode(self._expansion_text(rows, cols), add_special_tokens=False).ids
        if ids.count(self._image_token_id) != (rows * cols + 1) * self._image_seq_len:
            raise UnsupportedModel(f"the tokenizer does not keep {_IMAGE} and {_FAKE} as tokens of their own")
        return self._expansions.setdefault((rows, cols), np.array(ids, dtype=np.int32))

    def _expansion_text(self, rows: int, cols: int) -> str:
        tile = _IMAGE * self._image_seq_len
        whole = f"{_FAKE}{_GLOBAL}{tile}{_FAKE}"
        if rows == 0:
            return whole
        lines = ("".join(f"{_FAKE}<row_{r}_col_{c}>{tile}" for c in range(1, cols + 1)) for r in range(1, rows + 1))
        return "".join(f"{line}\n" for line in lines) + f"\n{whole}"

    def _token_id(self, token: str, config: dict[str, Any]) -> int:
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise UnsupportedModel(f"the tokenizer has no token {token}")
        told = config.get("image_token_id", token_id)
        if told != token_id:
            raise UnsupportedModel(f"config.json says that {token} is token {told}; the tokenizer says {token_id}")
        return int(token_id)


def _with_longer_side(width: int, height: int, side: int, *, even: bool) -> tuple[int, int]:
    """Size with this longer side and the same aspect; the shorter one at least 1, and rounded up to even if asked."""
    aspect = width / height
    shorter = int(side / aspect) if width >= height else int(side * aspect)
    if even and shorter % 2:
        shorter += 1
    shorter = max(shorter, 1)
    return (side, shorter) if width >= height else (shorter, side)


def _check_seq_len(image_seq_len: int, tile_side: int, config: dict[str, Any]) -> None:
    """The prompt must have as many image tokens as the vision tower and the connector make embeddings."""
    patch_side, scale = config.get("vision_config", {}).get("patch_size"), config.get("scale_factor")
    if patch_side is None or scale is None:
        return
    made = (tile_side // patch_side) ** 2 // scale**2
    if made != image_seq_len:
        raise UnsupportedModel(
            f"processor_config.json has image_seq_len {image_seq_len}, but tiles of {tile_side} pixels in patches of "
            f"{patch_side}, shuffled by {scale}, make {made} tokens"
        )


FAMILIES = {"idefics3": Idefics3, "smolvlm": Idefics3}
