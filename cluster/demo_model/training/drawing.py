"""Draws scenes, many at once, and puts pictures through files, as a client and the model's processor would."""

from __future__ import annotations

import io
import math

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from airside.cluster.demo_model.training.world import Random, Scene

MODEL_PX = 128  # what the model's picture processor makes of any picture: a square of this side
SCAN_PX = 8
SCAN_MARGIN = 2  # empty scan pixels around a digit, so that turning it cuts nothing off
SIDES = (0, 4, 3)  # of a circle, square, triangle; 0 is round
GROWTH = (1.0, 1.12, 1.1)  # how much further a shape's corners lie than its radius says


def draw(scenes: list[Scene], scans: Tensor, height: int, width: int, random: Random) -> tuple[Tensor, Tensor]:
    """Pictures, stretched to height x width, and the ink of their digits.

    Args:
        scans: [number, 8, 8], ink from 0 to 1.

    Returns:
        pixels [num_scenes, 3, height, width] from 0 to 255 and ink [num_scenes, height, width] from 0 to 1.
    """
    pixels = _grounds(scenes, height, width, random)
    _add_things(pixels, scenes)
    ink = torch.zeros(len(scenes), height, width)
    with_digit = [i for i, scene in enumerate(scenes) if scene.digit is not None]
    if with_digit:
        coverage = _digit_ink([scenes[i] for i in with_digit], scans, height, width)
        colour = torch.tensor([scenes[i].digit.rgb for i in with_digit])[:, :, None, None]  # type: ignore[union-attr]
        ink[with_digit] = coverage
        pixels[with_digit] += (colour - pixels[with_digit]) * coverage[:, None]
    return pixels.clamp_(0, 255), ink


def _axes(scenes: list[Scene], height: int, width: int) -> tuple[Tensor, Tensor]:
    """Of every pixel column and row the place in short sides: [num_scenes, width] and [num_scenes, height]."""
    size = torch.tensor([[scene.width_px, scene.height_px] for scene in scenes], dtype=torch.float32)
    size = size / size.amin(1, keepdim=True)
    return (
        size[:, :1] * (torch.arange(width) + 0.5) / width,
        size[:, 1:] * (torch.arange(height) + 0.5) / height,
    )


def _grounds(scenes: list[Scene], height: int, width: int, random: Random) -> Tensor:
    grounds = [scene.ground for scene in scenes]
    near, far = (torch.tensor([rgb])[0] for rgb in ([g.rgb for g in grounds], [g.rgb_far for g in grounds]))
    turn = torch.tensor([g.turn for g in grounds])
    across = (torch.arange(width) + 0.5) / width - 0.5
    down = (torch.arange(height) + 0.5) / height - 0.5
    along = turn.cos()[:, None, None] * across + turn.sin()[:, None, None] * down[:, None] + 0.5
    pixels = near[:, :, None, None] + (far - near)[:, :, None, None] * along[:, None]
    for i, ground in enumerate(grounds):
        if ground.grain:
            noise = random.standard_normal((1, height, width), dtype=np.float32) * np.float32(ground.grain)
            pixels[i] += torch.from_numpy(noise)
    return pixels


def _add_things(pixels: Tensor, scenes: list[Scene]) -> None:
    height, width = pixels.shape[-2:]
    across, down = _axes(scenes, height, width)
    for turn in range(max(len(scene.things) for scene in scenes)):
        for shape, sides in enumerate(SIDES):
            rows = [i for i, s in enumerate(scenes) if len(s.things) > turn and s.things[turn].shape == shape]
            if not rows:
                continue
            things = [scenes[i].things[turn] for i in rows]
            place = torch.tensor([[t.x, t.y, t.radius * GROWTH[shape], t.turn] for t in things])
            x = across[rows] - place[:, :1] * (across[rows, -1] + across[rows, 0])[:, None]
            y = down[rows] - place[:, 1:2] * (down[rows, -1] + down[rows, 0])[:, None]
            outside = _distance(x[:, None, :], y[:, :, None], place[:, 2, None, None], place[:, 3, None, None], sides)
            pixel = (across[rows, 1] - across[rows, 0] + down[rows, 1] - down[rows, 0]) / 2
            coverage = (0.5 - outside / pixel[:, None, None]).clamp_(0, 1)[:, None]
            colour = torch.tensor([t.rgb for t in things])[:, :, None, None]
            pixels[rows] += (colour - pixels[rows]) * coverage


def _distance(x: Tensor, y: Tensor, radius: Tensor, turn: Tensor, sides: int) -> Tensor:
    """How far each pixel lies outside a shape around (0, 0) of this circumradius; negative inside."""
    if sides == 0:
        return (x * x + y * y).sqrt() - radius
    first = turn + (0.0 if sides == 4 else math.pi / 2)
    edges = [first + 2 * math.pi * k / sides for k in range(sides)]
    outside: Tensor = x * edges[0].cos() + y * edges[0].sin()
    for edge in edges[1:]:
        outside = torch.maximum(outside, x * edge.cos() + y * edge.sin())
    return outside - radius * math.cos(math.pi / sides)


def _digit_ink(scenes: list[Scene], scans: Tensor, height: int, width: int) -> Tensor:
    """How much ink each pixel has: [num_scenes, height, width]."""
    digits = [scene.digit for scene in scenes if scene.digit is not None]
    across, down = _axes(scenes, height, width)
    place = torch.tensor([[d.x, d.y, d.side, d.turn, d.slant, d.sharpness] for d in digits])
    x = (across - place[:, :1] * (across[:, -1] + across[:, 0])[:, None])[:, None, :]
    y = (down - place[:, 1:2] * (down[:, -1] + down[:, 0])[:, None])[:, :, None]
    _, _, side, turn, slant, sharpness = (part[:, None, None] for part in place.T)
    half = side / 2 * (SCAN_PX + 2 * SCAN_MARGIN) / SCAN_PX
    u = (x * turn.cos() + y * turn.sin() + slant * y) / half
    v = (y * turn.cos() - x * turn.sin()) / half
    padded = functional.pad(scans[[d.scan for d in digits]], (SCAN_MARGIN,) * 4)[:, None]
    ink = functional.grid_sample(padded, torch.stack((u, v), -1), "bicubic", "zeros", align_corners=False)[:, 0]
    coverage: Tensor = ((ink.clamp(0, 1) - 0.5) * sharpness + 0.5).clamp(0, 1)
    return coverage


def as_received(pixels: Tensor, scenes: list[Scene], random: Random) -> Tensor:
    """Pictures of the model's size as they look after the file and the resizing: small ones blurred, most from JPEG.

    Args:
        pixels: [num_scenes, 3, 128, 128] from 0 to 255.

    Returns:
        the same shape, from -1 to 1.
    """
    out = torch.empty_like(pixels)
    for i, scene in enumerate(scenes):
        width, height = min(MODEL_PX, scene.width_px), min(MODEL_PX, scene.height_px)
        jpeg = random.random() < 0.5
        if not jpeg and width == height == MODEL_PX:
            out[i] = pixels[i]
            continue
        picture = Image.fromarray(pixels[i].permute(1, 2, 0).to(torch.uint8).numpy())
        if (width, height) != picture.size:
            picture = picture.resize((width, height), Image.Resampling.BOX)
        if jpeg:
            picture = Image.open(io.BytesIO(encode(picture, "jpg", int(random.integers(60, 96)))))
        if (width, height) != (MODEL_PX, MODEL_PX):
            picture = picture.resize((MODEL_PX, MODEL_PX), Image.Resampling.LANCZOS)
        out[i] = torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1)
    return out / 127.5 - 1


def encode(picture: Image.Image, suffix: str, quality: int = 90) -> bytes:
    """The bytes of a "png" or "jpg" file."""
    file = io.BytesIO()
    if suffix == "png":
        picture.save(file, "PNG", compress_level=4)
    else:
        picture.save(file, "JPEG", quality=quality)
    return file.getvalue()
