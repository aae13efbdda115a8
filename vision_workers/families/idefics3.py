"""Idefics3 and SmolVLM (Laurençon et al. 2024, arXiv 2408.12637)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer
from transformers import AutoImageProcessor

from airside.vision_workers.families.registry import UnsupportedModel

_IMAGE = "<image>"
_FAKE = "<fake_token_around_image>"
_GLOBAL = "<global-img>"

_IMAGE_SEQ_LEN_DEFAULT = 169  # the reference processor's, for checkpoints that do not say
_SIDE_MAX = 4096  # the reference processor never resizes a picture to more than this


class Idefics3:
    """The checkpoint's own image processor, and what its processor puts in the place of `<image>`.

    A picture becomes square tiles of `max_image_size`: without splitting, one; with splitting, a grid of tiles and,
    when the grid has more than one, the whole picture once more as the last ("global") tile.

    Pictures are processed one by one, while the reference processes those of a prompt together. The result is the
    same: since every tile has the same size, a tile is never padded; the reference only adds whole tiles of zeros to
    prompts with fewer tiles than others, with an attention mask of zeros, which the model drops again. The tiles of
    a prompt's pictures, one picture after the other, are those of the batch.
    """

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        try:
            # Pillow's resampling everywhere: torchvision's differs in the last bits, and is not always installed.
            self._processor = AutoImageProcessor.from_pretrained(
                folder, backend="pil", local_files_only=True, trust_remote_code=False
            )
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises plain Exception
            raise UnsupportedModel(f"{folder} has no usable image processor or tokenizer: {error}") from error
        self._image_seq_len = _image_seq_len(folder)
        self._tile_side = int(self._processor.max_image_size["longest_edge"])
        self._image_token_id = self._token_id(_IMAGE, config)
        self._expansions: dict[tuple[int, int], NDArray[np.int32]] = {}  # by grid, of which there are few
        _check_seq_len(self._image_seq_len, self._tile_side, config)
        self._expand(0, 0)  # refuses a tokenizer without the marks at once

    def shape(self, width: int, height: int) -> NDArray[np.int32]:
        """As `Family.shape`: marks, and `image_seq_len` image tokens for each tile."""
        return self._expand(*self._grid(width, height))

    def process(self, image: Image.Image) -> dict[str, NDArray[Any]]:
        """As `Family.process`.

        Returns:
            pixel_values: [num_tiles, 3, side, side] float32.
            pixel_attention_mask: [num_tiles, side, side] uint8; 1 where there is a picture.
        """
        made = self._processor([[image]], do_pad=True, return_row_col_info=True, return_tensors="np")
        grid = (made["rows"][0][0], made["cols"][0][0])
        assert grid == self._grid(*image.size), f"{image.size} became {grid}, not {self._grid(*image.size)}"
        return {
            "pixel_values": np.ascontiguousarray(made["pixel_values"][0], dtype=np.float32),
            "pixel_attention_mask": np.ascontiguousarray(made["pixel_attention_mask"][0], dtype=np.uint8),
        }

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


def _image_seq_len(folder: Path) -> int:
    """Image tokens per tile, from processor_config.json."""
    path = folder / "processor_config.json"
    told = json.loads(path.read_text()) if path.exists() else {}
    return int(told.get("image_seq_len", _IMAGE_SEQ_LEN_DEFAULT))


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
