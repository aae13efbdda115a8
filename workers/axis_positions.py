"""Positions on three axes, of steps that touch pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from airside.proto.messages import ImageRow, StepPlan
from airside.workers.model_config import ModelConfig
from airside.workers.pixels import PixelArena
from airside.workers.step_batch import StepBatch

GRID = "image_grid_thw"
"""Name of the tensor that says how many patches a picture has on each axis: [1, 3]."""

Grid = tuple[int, int, int]
"""How many tokens a picture has on each axis: time, height, width."""


class AxisPositions:
    """Puts the tokens of pictures in their places on the axes.

    Args:
        config: of a model with `rope_axes`, whose pictures are image tokens and nothing else.
        arena: where the pictures' grids are. They are read there each time: a few bytes, which stay as long as a plan
            may name them, while whoever keeps embeddings may drop them.
    """

    def __init__(self, config: ModelConfig, arena: PixelArena) -> None:
        assert config.rope_axes is not None
        assert config.image_token_id is not None
        self._merge_size = config.rope_axes.merge_size
        self._image_token_id = config.image_token_id
        self._arena = arena

    def placed(self, plan: StepPlan, batch: StepBatch) -> StepBatch:
        """The batch with [3, num_tokens] positions. Raises ValueError, PixelsUnreadable."""
        places = np.flatnonzero(batch.rows.token_ids == self._image_token_id)
        positions = place_on_axes(
            batch.positions.cpu().numpy(), batch.rows.starts, places, plan.images, [self._grid(i) for i in plan.images]
        )
        return dataclasses.replace(batch, positions=torch.from_numpy(positions).to(batch.positions.device))

    def _grid(self, image: ImageRow) -> Grid:
        """Raises ValueError for a picture without one."""
        found = self._arena.read(image.pixels, torch.device("cpu"), (GRID,)).get(GRID)
        if found is None:
            raise ValueError(f"the pixels of image {image.image_index} came without {GRID}")
        time, height, width = found.view(-1).tolist()
        return time, height // self._merge_size, width // self._merge_size


def place_on_axes(
    positions: NDArray[np.int32],
    starts: NDArray[np.int32],
    places: NDArray[np.int64],
    images: Sequence[ImageRow],
    grids: Sequence[Grid],
) -> NDArray[np.int32]:
    """Positions on each axis.

    A picture's tokens lie in its grid, the width fastest, from the position after the text before it on all axes. The
    text behind it goes on from the largest of them:

        tokens    a  b  [2 x 3 grid:  .  .  .  .  .  . ]  c  d
        time      0  1                2  2  2  2  2  2    5  6
        height    0  1                2  2  2  3  3  3    5  6
        width     0  1                2  3  4  2  3  4    5  6

    Args:
        positions: [num_tokens]: of each row's first token the right one, of each other one more than before it.
        starts: [num_rows + 1]: row i is tokens `[starts[i], starts[i + 1])`.
        places: those of the image tokens, in order.
        images: the pictures that they are of, in order.
        grids: of each of them.
    Returns: [3, num_tokens].
    Raises:
        ValueError: a picture's tokens are not in one piece, or more than its grid has.
    """
    axes = np.repeat(positions[None], 3, axis=0)
    taken = 0
    for image, grid in zip(images, grids, strict=True):
        mine = places[taken : taken + image.embed_count]
        taken += image.embed_count
        size, end = int(np.prod(grid)), image.embed_start + image.embed_count
        if len(mine) != image.embed_count or mine[-1] - mine[0] != len(mine) - 1 or end > size:
            raise ValueError(
                f"image tokens [{image.embed_start}, {end}) of image {image.image_index} do not fit its grid of {grid}"
            )
        first, behind = int(mine[0]), int(mine[-1]) + 1
        origin = axes[0, first] - image.embed_start
        axes[:, first:behind] = origin + np.stack(np.unravel_index(np.arange(image.embed_start, end), grid))
        if end == size:
            row_end = starts[np.searchsorted(starts, first, side="right")]
            axes[:, behind:row_end] -= size - max(grid)
    return axes
