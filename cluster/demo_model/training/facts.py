"""What is true of a scene, as numbers: what the tower's throw-away read-outs have to say."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from airside.cluster.demo_model.training.tower import GRID
from airside.cluster.demo_model.training.world import COLOURS, SHAPES, Scene

NO_DIGIT = 10
NO_COLOUR = len(COLOURS)
NO_SHAPE = len(SHAPES)
PAIRS = ((0, 1), (0, 2), (1, 2))  # of shapes
SIDES = ("left", "right", None)


@dataclass(frozen=True, slots=True)
class Facts:
    """About `n` pictures; all whole numbers. Those about things mean nothing for a picture of a digit.

    digit: [n], 10 for none. total: [n]. kinds: [n, 6, 3], how many of each colour and shape. only: [n, 3], colour of
    the only circle, square, triangle, 6 where there isn't one. outermost: [n, 2, 2], colour and shape of the leftmost
    and the rightmost thing. sides: [n, 3], index into `SIDES` for each of `PAIRS`. centre: [n, 64], kind of the thing
    whose centre lies in the patch, from 1, or 0. cover: [n, 64], colour at the patch's middle, from 1, or 0.
    """

    digit: Tensor
    total: Tensor
    kinds: Tensor
    only: Tensor
    outermost: Tensor
    sides: Tensor
    centre: Tensor
    cover: Tensor


def facts(scenes: list[Scene]) -> Facts:
    """All facts about all scenes."""
    shapes, colours = range(len(SHAPES)), range(len(COLOURS))
    return Facts(
        digit=torch.tensor([NO_DIGIT if s.digit is None else s.digit.value for s in scenes]),
        total=torch.tensor([len(s.things) for s in scenes]),
        kinds=torch.tensor([[[s.count(shape, colour) for shape in shapes] for colour in colours] for s in scenes]),
        only=torch.tensor([[_only(s, shape) for shape in shapes] for s in scenes]),
        outermost=torch.tensor([[_outermost(s, "left"), _outermost(s, "right")] for s in scenes]),
        sides=torch.tensor([[SIDES.index(s.side_of(*pair)) for pair in PAIRS] for s in scenes]),
        centre=torch.stack([_centres(s) for s in scenes]),
        cover=torch.stack([_cover(s) for s in scenes]),
    )


def _only(scene: Scene, shape: int) -> int:
    thing = scene.only(shape)
    return NO_COLOUR if thing is None else thing.colour


def _outermost(scene: Scene, side: str) -> tuple[int, int]:
    thing = scene.outermost(side) if len(scene.things) != 1 else scene.things[0]
    return (NO_COLOUR, NO_SHAPE) if thing is None else (thing.colour, thing.shape)


def _centres(scene: Scene) -> Tensor:
    grid = torch.zeros(GRID, GRID, dtype=torch.long)
    for thing in scene.things:
        row, column = (min(GRID - 1, int(place * GRID)) for place in (thing.y, thing.x))
        grid[row, column] = 1 + thing.colour * len(SHAPES) + thing.shape
    return grid.flatten()


def _cover(scene: Scene) -> Tensor:
    grid = torch.zeros(GRID, GRID, dtype=torch.long)
    middles = (torch.arange(GRID) + 0.5) / GRID
    short = min(scene.width_px, scene.height_px)
    for thing in scene.things:
        across = (middles - thing.x) * scene.width_px / short
        down = (middles - thing.y) * scene.height_px / short
        inside = across[None] ** 2 + down[:, None] ** 2 < (0.9 * thing.radius) ** 2
        grid[inside] = 1 + thing.colour
    return grid.flatten()
