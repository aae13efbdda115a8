"""Pictures for the tests: processed one by one, as vision workers do, and laid into an arena segment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from transformers import AutoProcessor, BatchFeature

from airside.proto.messages import PixelsRef, TensorRef
from tests.checkpoints import IMAGE_TOKEN_ID, IMAGE_TOKENS_PER_TILE

SLAB = 4096


def picture(width: int, height: int, seed: int) -> Image.Image:
    """Coloured noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt with pictures: what transformers gets, and what the worker gets."""

    inputs: BatchFeature
    tokens: list[int]
    pixels: list[PixelsRef]
    image_places: list[list[int]]  # indices of each picture's tokens


def make_prompt(checkpoint: Path, arena: Path, text: str, images: list[Image.Image], name: str) -> Prompt:
    """Writes one segment per picture into the folder `arena`, named `<name>-<index>`."""
    processor = AutoProcessor.from_pretrained(checkpoint)
    inputs = processor(text=text, images=images or None, return_tensors="pt")
    tokens = inputs["input_ids"][0].tolist()
    places = [index for index, token in enumerate(tokens) if token == IMAGE_TOKEN_ID]
    pixels, image_places = [], []
    for index, image in enumerate(images):
        tensors = {k: v.numpy() for k, v in processor.image_processor([image], return_tensors="pt").items()}
        pixels.append(write_segment(arena, f"{name}-{index}", tensors))
        count = tensors["pixel_values"].shape[1] * IMAGE_TOKENS_PER_TILE
        image_places.append(places[:count])
        places = places[count:]
    assert not places
    return Prompt(inputs, tokens, pixels, image_places)


def write_segment(arena: Path, name: str, tensors: dict[str, NDArray[np.generic]]) -> PixelsRef:
    """A segment whose one slab, at byte SLAB, holds the tensors one after another."""
    refs, data = [], b""
    for key, tensor in tensors.items():
        refs.append(TensorRef(key, str(tensor.dtype), list(tensor.shape), len(data)))
        data += tensor.tobytes()
    (arena / name).write_bytes(bytes(SLAB) + data)
    return PixelsRef(name, SLAB, len(data), refs)
