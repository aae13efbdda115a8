"""What transformers answers, greedily, to prompts with pictures and without: the measure for whole servers."""

from __future__ import annotations

import io
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from airside.workers.model_config import load_model_config
from tests.checkpoints import load_processor

NEW_TOKENS = 24
NUM_PROMPTS = 20

_PATTERNS = [
    "{0}",
    "{0} What is it?",
    "The picture number {1}: {0}",
    "Before the gate opens, {0} waits for the captain.",
    "{0}{0}",
    "A line,\n{0}\n\nand another line.\n\n{0}\n",
    "A {0} and {0}, are they alike?",
    "{0}{0}{0} Which is the odd one of {1}?",
    "One {0}, two {0}, three {0}",
    "{0}{0}{0}{0}",
    "Left {0}, right {0}; above {0} and below {0}: which way?",
]  # {0}: a picture, {1}: a number that differs

_SIZES = [(48, 64), (90, 30), (32, 32), (20, 100), (128, 96), (7, 5), (61, 67)]  # (width, height)


@dataclass(frozen=True)
class Golden:
    """A checkpoint, requests, and what transformers answers to each alone."""

    model: Path
    prompts: list[Any]  # Any: texts, or lists of token ids
    images: list[list[bytes]]
    answers: list[list[int]]


def picture_golden(path: Path, mark: str = "<image>") -> Golden:
    """Twenty prompts with one to four pictures, and text before, between and after them, or none.

    Args:
        path: a checkpoint that `load_processor` and AutoModelForImageTextToText load.
        mark: what a prompt has in a picture's place.
    """
    processor = load_processor(path)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    never = list(load_model_config(path).picture_ids)
    rng = random.Random(3)
    prompts, files, answers = [], [], []
    for index in range(NUM_PROMPTS):
        text = _PATTERNS[index % len(_PATTERNS)].format(mark, index)
        pictures = [noise(rng, *rng.choice(_SIZES)) for _ in range(text.count(mark))]
        inputs = processor(text=text, images=pictures, return_tensors="pt")
        prompts.append(text)
        files.append([png(picture) for picture in pictures])
        answers.append(greedy(model, inputs, never))
    assert len({tuple(answer) for answer in answers}) > NUM_PROMPTS // 2, "answers that tell prompts apart"
    return Golden(path, prompts, files, answers)


def noise(rng: random.Random, width: int, height: int) -> Image.Image:
    """Coloured noise."""
    return Image.frombytes("RGB", (width, height), rng.randbytes(3 * width * height))


def png(picture: Image.Image) -> bytes:
    """The picture as a file."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


@torch.inference_mode()
def greedy(model: Any, inputs: Any, never: list[int] | None = None) -> list[int]:
    """The next `NEW_TOKENS` tokens, whatever they are but `never`. Any: a transformers model and its inputs."""
    made = model.generate(
        **inputs,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        suppress_tokens=never,
    )
    ids: list[int] = made[0, inputs["input_ids"].shape[1] :].tolist()
    return ids
