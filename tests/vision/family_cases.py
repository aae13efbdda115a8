"""Forty pictures, and what must be equal to the Hugging Face processor of a checkpoint for each of them.

A family's test loads its `Family` and its `Reference`, and calls `assert_equal_to` for each of `PICTURES`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from airside.vision_workers.families.family import Family
from airside.workers.model_config import load_model_config
from tests.checkpoints import load_processor

_TEXT_COLUMNS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}


def _noise(width: int, height: int) -> Image.Image:
    """Each pixel another colour: every resampled pixel depends on its place."""
    return Image.fromarray(np.random.default_rng(width * height).integers(0, 256, (height, width, 3), dtype=np.uint8))


def _photo(width: int, height: int) -> Image.Image:
    """Smooth colours with soft edges and a little grain."""
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / (7 + 5 * i) + i) + np.cos(y / (11 - 3 * i)) for i in range(3)]
    grain = np.random.default_rng(width + height).normal(0, 4, (height, width, 3))
    return Image.fromarray((127 + 60 * np.stack(waves, axis=2) + grain).clip(0, 255).astype(np.uint8))


def _drawing(width: int, height: int) -> Image.Image:
    """Hard edges: lines one pixel wide and filled shapes on white, which make resampling overshoot."""
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    draw.ellipse((width // 4, height // 4, width // 2, height // 2), fill="red", outline="black")
    draw.rectangle((width // 2, height // 2, width - 1, height - 1), fill="blue")
    for at in range(0, max(width, height), 5):
        draw.line((at, 0, 0, at), fill="black")
    return image


def _flat(width: int, height: int) -> Image.Image:
    """One colour, which no resampling changes."""
    return Image.new("RGB", (width, height), (200, 30, 255))


_KINDS: dict[str, Callable[[int, int], Image.Image]] = {
    "noise": _noise,
    "photo": _photo,
    "drawing": _drawing,
    "flat": _flat,
}
_SIZES = {
    "noise": [
        *[(1, 1), (2, 2), (3, 1), (1, 3), (1, 64), (64, 1), (31, 32), (32, 32), (33, 32), (32, 33), (28, 28)],
        *[(64, 32), (65, 32), (32, 65), (96, 96), (97, 95), (257, 27), (27, 257), (128, 128), (129, 128)],
    ],
    "photo": [(100, 100), (127, 128), (200, 150), (150, 200), (333, 111), (111, 334), (640, 480), (480, 640), (56, 84)],
    "drawing": [(128, 127), (800, 4), (4, 800), (210, 297), (300, 200), (57, 83), (512, 512), (1024, 256)],
    "flat": [(1, 2), (40, 40), (700, 500)],
}  # (width, height)

PICTURES = [
    pytest.param(kind, width, height, id=f"{kind}-{width}x{height}")
    for kind, sizes in _SIZES.items()
    for width, height in sizes
]
"""Parameters `kind, width, height` of `picture`: sides below, at and above patches, tiles and whole pictures."""
assert len(PICTURES) == 40


def picture(kind: str, width: int, height: int) -> Image.Image:
    """One of `PICTURES`: the same pixels every time."""
    return _KINDS[kind](width, height)


@dataclass(frozen=True, slots=True)
class Reference:
    """The checkpoint's own processor, with the Pillow backend."""

    processor: Any  # Any: a transformers processor
    mark: str
    prompt_axis: bool  # its tensors have an axis of prompts before that of pictures
    mark_text: tuple[str, str]  # what a prompt's text gets before and after each mark

    @classmethod
    def load(cls, checkpoint: Path, mark: str = "<image>", *, prompt_axis: bool = False) -> Reference:
        """Loads it; `mark` is what a prompt has in a picture's place."""
        mark_text = load_model_config(checkpoint).pictures.mark_text
        return cls(load_processor(checkpoint), mark, prompt_axis, mark_text)

    def inputs(self, text: str, images: list[Image.Image]) -> tuple[list[int], dict[str, NDArray[Any]]]:
        """Token ids of a prompt with its placeholders, and the tensors of its pictures."""
        made = self.processor(text=text, images=images, return_tensors="np")
        tensors = {name: value for name, value in made.items() if name not in _TEXT_COLUMNS}
        if self.prompt_axis:
            tensors = {name: value[0] for name, value in tensors.items()}
        return made["input_ids"][0].tolist(), tensors

    def expanded(self, text: str, expansions: list[NDArray[np.int32]]) -> list[int]:
        """Token ids of a prompt as the server makes them: tokenized with its marks, which expansions then replace."""
        mark_id = self.processor.tokenizer.convert_tokens_to_ids(self.mark)
        left = iter(expansions)
        ids: list[int] = []
        text = text.replace(self.mark, self.mark.join(self.mark_text))
        for token_id in self.processor.tokenizer(text)["input_ids"]:
            ids.extend(next(left).tolist() if token_id == mark_id else [token_id])
        assert next(left, None) is None, f"{text!r} has fewer marks than pictures"
        return ids


def assert_equal_to(reference: Reference, family: Family, image: Image.Image) -> None:
    """Placeholder ids (from the size alone) and every tensor of one picture, bit for bit."""
    text = f"a{reference.mark}b"
    ids, tensors = reference.inputs(text, [image])
    assert reference.expanded(text, [family.shape(*image.size).expansion]) == ids
    _assert_same(family.process(image), tensors)


def assert_equal_together(reference: Reference, family: Family, images: list[Image.Image]) -> None:
    """Pictures of one prompt, processed one by one: end to end, they are what the reference makes of them at once."""
    text = "first " + f"{reference.mark} then " * len(images) + "last"
    ids, tensors = reference.inputs(text, images)
    assert reference.expanded(text, [family.shape(*image.size).expansion for image in images]) == ids
    alone = [family.process(image) for image in images]
    _assert_same({name: np.concatenate([part[name] for part in alone]) for name in alone[0]}, tensors)


def changed(checkpoint: Path, folder: Path, file: str, **values: Any) -> Path:
    """A copy of the checkpoint with other values in one of its files; those of an object replace its own by name."""
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    path = folder / file
    content = json.loads(path.read_text())
    for key, value in values.items():
        content[key] = {**content[key], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(content))
    return folder


def _assert_same(made: dict[str, NDArray[Any]], expected: dict[str, NDArray[Any]]) -> None:
    assert made.keys() == expected.keys()
    for name, tensor in made.items():
        assert tensor.flags.c_contiguous, name
        assert tensor.shape == expected[name].shape, name
        assert np.array_equal(tensor, expected[name]), name
        if np.issubdtype(expected[name].dtype, np.floating):
            assert tensor.dtype == np.float32, name
