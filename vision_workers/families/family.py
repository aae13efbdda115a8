"""What a vision worker asks of a family of image-to-text models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from airside.proto.image_content import PixelRange


class UnsupportedModel(Exception):
    """The checkpoint's pictures cannot be processed; the text says why and what would help."""


@dataclass(frozen=True, slots=True)
class ImageShape:
    """What a picture is in the prompt."""

    expansion: NDArray[np.int32]  # [num_tokens]: the token ids that take the place of its mark
    rope_advance: int = 0  # by how much positions go on over it; 0: by the number of its tokens


class Family(Protocol):
    """A checkpoint's way with pictures. Made with `(folder, config)`: the checkpoint, and its config.json.

    A family's file in this folder exports `FAMILIES`: the class by `model_type`. What is slow to import is imported in
    `__init__`, since all files are imported to find one.

    Raises, when it is made:
        UnsupportedModel: parts are missing, or do not fit one another.
    """

    def shape(self, width: int, height: int) -> ImageShape:
        """From the size of an upright picture, in pixels. Raises ImageError for one that the family cannot take."""
        ...

    def process(self, image: Image.Image) -> dict[str, NDArray[Any]]:
        """The tensors of one upright RGB picture by name; the family's docstring gives their shapes and dtypes."""
        ...


@runtime_checkable
class ScalingFamily(Family, Protocol):
    """A family that makes of a picture as many tokens as it has room for; its config says `takes_pixel_ranges`."""

    def within(self, pixels: PixelRange) -> Self:
        """The same, for pictures that are scaled to so many pixels. Raises ImageError where the checkpoint has less."""
        ...
