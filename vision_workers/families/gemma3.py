"""Gemma 3 (Gemma Team 2025, arXiv 2503.19786): every picture becomes the same number of image tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer

from airside.vision_workers.families.family import ImageShape, UnsupportedModel
from airside.vision_workers.families.image_processor import load_image_processor, load_tokenizer, processor_config
from airside.vision_workers.pixels import levels_of, pixels_of, resize, spread

_TOKENS_PER_IMAGE_DEFAULT = 256  # of Gemma3Config, as the values below
_IDS_DEFAULT = {"image_token": 262_144, "boi_token": 255_999, "eoi_token": 256_000}
_SIDE_DEFAULT = 224
_PROCESSOR = "Gemma3ImageProcessorPil"


class Gemma3:
    """What the checkpoint's own image processor makes of a picture, scaled to the one size that the tower takes.

    `<start_of_image>` becomes itself, image tokens, and `<end_of_image>`.

    The reference processor also puts an empty line before and after that. It does so in the text, where newlines join
    with those that are there already, so the server does that too, before it tokenizes
    (`ModelConfig.image_mark_text`).

    Pan and scan, which adds crops of long pictures, is refused: it is for whoever asks for it, and checkpoints do not.
    """

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self._processor = load_image_processor(folder)
        name = type(self._processor).__name__
        if name != _PROCESSOR:
            raise UnsupportedModel(f"{folder} has the image processor {name}; Gemma 3's pictures need {_PROCESSOR}")
        if self._processor.do_pan_and_scan:
            raise UnsupportedModel(
                f"the image processor of {folder} adds crops of long pictures (do_pan_and_scan), which is not "
                "supported; set do_pan_and_scan to false"
            )
        self._levels = levels_of(self._processor)
        self._side = side = int((config.get("vision_config") or {}).get("image_size", _SIDE_DEFAULT))
        size = self._processor.size
        if not self._processor.do_resize or (size.height, size.width) != (side, side):
            raise UnsupportedModel(
                f"the image processor of {folder} does not make pictures of the {side}x{side} pixels that the vision "
                "tower takes; set its do_resize to true and its size to that height and width"
            )
        tokens = config.get("mm_tokens_per_image", _TOKENS_PER_IMAGE_DEFAULT)
        told = processor_config(folder).get("image_seq_length", tokens)
        if told != tokens:
            raise UnsupportedModel(
                f"processor_config.json has image_seq_length {told}, but the model makes {tokens} embeddings of a "
                "picture (mm_tokens_per_image)"
            )
        ids = {name: _token_id(config, name) for name in _IDS_DEFAULT}
        _check_tokens(load_tokenizer(folder), ids)
        expansion = [ids["boi_token"], *[ids["image_token"]] * tokens, ids["eoi_token"]]
        self._shape = ImageShape(np.array(expansion, dtype=np.int32))

    def shape(self, width: int, height: int) -> ImageShape:
        """As `Family.shape`: the mark, `mm_tokens_per_image` image tokens, and the mark of the end, for every size."""
        del width, height
        return self._shape

    def process(self, image: Image.Image) -> dict[str, NDArray[Any]]:
        """As `Family.process`.

        Returns:
            pixel_values: [1, 3, image_size, image_size] float32.
        """
        out = np.empty((1, 3, self._side, self._side), np.float32)
        scaled = resize(pixels_of(image), self._side, self._side, self._processor.resample)
        spread(scaled, self._levels, out[0])
        return {"pixel_values": out}


def _token_id(config: dict[str, Any], name: str) -> int:
    return int(config.get(f"{name}_id", config.get(f"{name}_index", _IDS_DEFAULT[name])))


def _check_tokens(tokenizer: Tokenizer, ids: dict[str, int]) -> None:
    missing = [f"{name} {token_id}" for name, token_id in ids.items() if tokenizer.id_to_token(token_id) is None]
    if missing:
        raise UnsupportedModel(f"the tokenizer lacks tokens that config.json names: {', '.join(missing)}")


FAMILIES = {"gemma3": Gemma3}
