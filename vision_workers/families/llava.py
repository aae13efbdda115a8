"""LLaVA (Liu et al. 2023, arXiv 2304.08485), with the image processor of CLIP, of SigLIP, or its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from airside.vision_workers.families.family import ImageShape, UnsupportedModel
from airside.vision_workers.families.image_processor import load_image_processor, processor_config
from airside.vision_workers.image_error import Cause, ImageError
from airside.vision_workers.pixels import levels_of, pixels_of, resize, spread

_IMAGE_TOKEN_ID_DEFAULT = 32_000  # of LlavaConfig, as the values below
_TOWER_DEFAULTS = {"clip_vision_model": (224, 32), "siglip_vision_model": (224, 16)}  # (image_size, patch_size)
_NO_TOWER_CONFIG = {"image_size": 336, "patch_size": 14}

_PLAIN_PROCESSORS = ("CLIPImageProcessorPil", "SiglipImageProcessorPil", "LlavaImageProcessorPil")
"""Those that resize, cut out the middle, rescale and normalise, in this order."""


_PADDED_SIDE_MAX = 8192
"""Of a picture that is padded to a square before it is scaled: 64 million pixels, however few it has itself."""


class Llava:
    """The checkpoint's own image processor; `<image>` becomes as many image tokens as a picture has patches.

    Whatever its size, a picture is scaled and cut to the one size that the tower takes. So all pictures have one
    expansion.
    """

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self._processor = load_image_processor(folder)
        side, patch = _tower_sizes(config)
        size = _size_made(self._processor)
        if size != (side, side):
            made = "pictures of many sizes" if size is None else f"pictures of {size[0]}x{size[1]} pixels"
            raise UnsupportedModel(
                f"the image processor of {folder} makes {made}, but the vision tower takes {side}x{side}; set its "
                f"crop_size, or its size, to that height and width"
            )
        tokens = _num_tokens(config, side, patch)
        _check_num_tokens(processor_config(folder), side, tokens)
        self._side = side
        self._levels = levels_of(self._processor)
        token_id = config.get("image_token_id", config.get("image_token_index", _IMAGE_TOKEN_ID_DEFAULT))
        self._shape = ImageShape(np.full(tokens, token_id, dtype=np.int32))

    def shape(self, width: int, height: int) -> ImageShape:
        """As `Family.shape`: image tokens alone, the same number for every size."""
        if self._processor.do_pad and max(width, height) > _PADDED_SIDE_MAX:
            raise ImageError(
                Cause.TOO_MANY_PIXELS,
                f"the picture is {width}x{height} pixels; this model pads it to a square, so neither side may be more "
                f"than {_PADDED_SIDE_MAX}",
            )
        return self._shape

    def process(self, image: Image.Image) -> dict[str, NDArray[Any]]:
        """As `Family.process`.

        Returns:
            pixel_values: [1, 3, image_size, image_size] float32.
        """
        size = self._resized(*image.size)
        if size is None:
            made = self._processor([image], return_tensors="np")["pixel_values"]
            return {"pixel_values": np.ascontiguousarray(made, dtype=np.float32)}
        pixels = resize(pixels_of(image), *size, self._processor.resample)
        top, left = (pixels.shape[0] - self._side) // 2, (pixels.shape[1] - self._side) // 2
        out = np.empty((1, 3, self._side, self._side), dtype=np.float32)
        spread(pixels[top : top + self._side, left : left + self._side], self._levels, out[0])
        return {"pixel_values": out}

    def _resized(self, width: int, height: int) -> tuple[int, int] | None:
        """Size of the picture whose middle is cut out; None: the image processor does something else, by itself."""
        processor, size = self._processor, self._processor.size
        if type(processor).__name__ not in _PLAIN_PROCESSORS or not processor.do_resize or processor.do_pad:
            return None
        if processor.resample is None or size.longest_edge:
            return None
        if size.shortest_edge:
            short, longer = size.shortest_edge, int(size.shortest_edge * max(width, height) / min(width, height))
            resized = (short, longer) if width <= height else (longer, short)
        else:
            resized = size.width, size.height
        return resized if min(resized) >= self._side else None


def _tower_sizes(config: dict[str, Any]) -> tuple[int, int]:
    """(image_size, patch_size) of the vision tower."""
    vision = config.get("vision_config") or _NO_TOWER_CONFIG
    tower = vision.get("model_type", "clip_vision_model")
    if tower not in _TOWER_DEFAULTS:
        known = ", ".join(_TOWER_DEFAULTS)
        raise UnsupportedModel(f"pictures for a vision tower of type {tower} are not supported; supported: {known}")
    side, patch = _TOWER_DEFAULTS[tower]
    return vision.get("image_size", side), vision.get("patch_size", patch)


def _size_made(processor: Any) -> tuple[int, int] | None:
    """(height, width) of all that the image processor makes; None: it depends on the picture."""
    if processor.do_center_crop:
        return processor.crop_size.height, processor.crop_size.width
    size = processor.size
    if processor.do_resize and size.height and size.width:
        return size.height, size.width
    pads_first = type(processor).__name__ == "LlavaImageProcessorPil" and processor.do_pad
    if processor.do_resize and pads_first and size.shortest_edge:
        return size.shortest_edge, size.shortest_edge  # padded to a square before it is scaled
    return None


def _num_tokens(config: dict[str, Any], side: int, patch: int) -> int:
    """How many embeddings the model makes of a picture."""
    has_class_token = (config.get("vision_config") or {}).get("model_type", "clip_vision_model") == "clip_vision_model"
    drops_first = config.get("vision_feature_select_strategy", "default") == "default"
    return int((side // patch) ** 2 + has_class_token - drops_first)


def _check_num_tokens(told: dict[str, Any], side: int, tokens: int) -> None:
    """The reference processor counts by values of its own; where there are none, the model's count is all there is."""
    patch = told.get("patch_size")
    if patch is None:
        return
    drops_first = told.get("vision_feature_select_strategy") == "default"
    counted = (side // patch) ** 2 + told.get("num_additional_image_tokens", 0) - drops_first
    if counted != tokens:
        raise UnsupportedModel(
            f"processor_config.json makes {counted} image tokens of a picture (patch_size, "
            f"num_additional_image_tokens, vision_feature_select_strategy), but the model makes {tokens} embeddings"
        )


FAMILIES = {"llava": Llava}
