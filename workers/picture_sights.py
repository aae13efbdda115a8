"""What the tokens of a step see, of a model whose image tokens attend to the whole of their picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from airside.proto.messages import ImageRow
from airside.workers.placed_rows import spans
from airside.workers.step_batch import Rows, StepBatch


def with_sights(batch: StepBatch, images: Sequence[ImageRow], image_token_id: int) -> StepBatch:
    """The batch with its `attend_to`. Raises ValueError when there are more or fewer image tokens than embeddings."""
    ends = torch.from_numpy(find_sight_ends(batch.rows, images, image_token_id))
    return dataclasses.replace(batch, attend_to=ends.to(batch.positions.device))


def find_sight_ends(rows: Rows, images: Sequence[ImageRow], image_token_id: int) -> NDArray[np.int32]:
    """[num_tokens]: the end of what each token sees in its sequence.

    Image tokens of one picture that follow one another, a run, see up to the end of the run; all others up to their
    own place. The engine ends no row inside a run (`EngineConfig.atomic_images`). A row may begin inside one: what is
    before was found in the prefix cache, where it came from a step that had the whole run, of the same picture.
    """
    ends = spans(rows.num_computed, rows.num_computed + rows.num_new) + np.int32(1)
    places = np.flatnonzero(rows.token_ids == image_token_id)
    picture = np.repeat(np.arange(len(images)), [image.embed_count for image in images])
    if len(places) != len(picture):
        raise ValueError(f"{len(places)} image tokens and {len(picture)} image embeddings in one step")
    if not len(places):
        return ends
    is_last = np.append((np.diff(places) != 1) | (np.diff(picture) != 0), True)
    last_of_run = places[is_last]
    run = np.cumsum(is_last) - is_last
    ends[places] = ends[last_of_run[run]]
    return ends
