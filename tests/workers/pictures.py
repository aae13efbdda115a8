"""Prompts with pictures for a lone runner: processed one by one, as vision workers do, and laid into segments."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from transformers import AutoModelForImageTextToText, BatchFeature

from airside.proto.messages import PixelsRef, TensorRef
from airside.workers.load import load_runner
from airside.workers.model_runner import ModelRunner
from airside.workers.parallel import RankGroup
from airside.workers.pixels import PixelArena
from tests.checkpoints import IMAGE_TOKEN_ID, load_processor
from tests.workers.step_plans import Track, run_tracks, scattered_blocks, worker_settings

SLAB = 4096
NUM_TOKENS = 8


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


def make_prompt(
    checkpoint: Path,
    arena: Path,
    text: str,
    images: list[Image.Image],
    name: str,
    mark: str = "<image>",
    image_token_id: int = IMAGE_TOKEN_ID,
) -> Prompt:
    """Writes one segment per picture into the folder `arena`, named `<name>-<index>`; `mark`: a picture in `text`."""
    processor = load_processor(checkpoint)
    inputs = processor(text=text, images=images or None, return_tensors="pt")
    tokens = inputs["input_ids"][0].tolist()
    places = [index for index, token in enumerate(tokens) if token == image_token_id]
    pixels, image_places = [], []
    for index, image in enumerate(images):
        tensors = {k: v.numpy() for k, v in processor.image_processor([image], return_tensors="pt").items()}
        pixels.append(write_segment(arena, f"{name}-{index}", tensors))
        count = processor(text=mark, images=[image])["input_ids"][0].count(image_token_id)
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


def runner_for(path: Path, arena: Path) -> ModelRunner:
    """The model on one rank, with 256 blocks."""
    runner = load_runner(worker_settings(str(path)), RankGroup(0, 1), PixelArena(arena))
    runner.allocate(256)
    return runner


def tracks_for(prompts: list[Prompt], seed: int = 0) -> list[Track]:
    """One sequence per prompt, in blocks that depend on the seed."""
    blocks = scattered_blocks(len(prompts), 64, seed)
    return [
        Track(seq_id, list(p.tokens), table, p.pixels, p.image_places)
        for seq_id, (p, table) in enumerate(zip(prompts, blocks, strict=True))
    ]


def generate(runner: ModelRunner, prompts: list[Prompt], chunk: int) -> list[list[int]]:
    """The next `NUM_TOKENS` tokens of each prompt, all computed together in chunks."""
    return run_tracks(runner.execute, tracks_for(prompts), chunk, NUM_TOKENS)


def expected_tokens(path: Path, prompt: Prompt, never: list[int] | None = None) -> list[int]:
    """The next `NUM_TOKENS` tokens of transformers, none of them among `never`."""
    model = AutoModelForImageTextToText.from_pretrained(path)
    out = model.generate(
        **prompt.inputs,
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        suppress_tokens=never,
    )
    tokens: list[int] = out[0, len(prompt.tokens) :].tolist()
    return tokens
