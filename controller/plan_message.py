"""Between the engine's values and the bus: plans on their way to the ranks, outputs on their way to the gateways."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType

from airside import _core
from airside.controller.vision.ledger import VisionLedger
from airside.proto.codec import VERSION, pack_rows
from airside.proto.messages import FinishedRow, ImageRow, OpenedRow, OutputBatch, StepPlan


def _reader(cls: type, *but: str) -> Callable[[object], tuple[object, ...]]:
    """Reads the fields of a message's row, in order, from a value of the engine that has them by the same names."""
    return operator.attrgetter(*(field.name for field in dataclasses.fields(cls) if field.name not in but))


_read_opened, _read_finish = _reader(OpenedRow), _reader(FinishedRow, "image_cause")  # which is its last
_NO_ROWS = pack_rows([])
_NO_CAUSES: Mapping[int, str] = MappingProxyType({})


def plan_frame(plan: _core.StepPlan, ledger: VisionLedger) -> bytes:
    """The engine's plan as an encoded `StepPlan`, with the place and the content of each image's pixels.

    Here and below the engine writes its columns into the frame itself: through Python they would cost several times
    as much.
    """
    if plan.is_plain:
        return plan.frame(VERSION, StepPlan.kind, _NO_ROWS, _NO_ROWS, _NO_ROWS, _NO_ROWS)
    images = [
        ImageRow(seq_id, image_index, start, count, *ledger.pixels(seq_id, image_index))
        for seq_id, image_index, start, count in plan.images
    ]
    opened = [_read_opened(row) for row in plan.opened]
    ahead = [ImageRow(*image, 0, 0, *ledger.pixels(*image)) for image in plan.ahead]
    scores = pack_rows(plan.prompt_logprobs)
    return plan.frame(VERSION, StepPlan.kind, pack_rows(images), scores, pack_rows(opened), pack_rows(ahead))


def output_frame(output: _core.ClientOutput, image_causes: Mapping[int, str] = _NO_CAUSES) -> bytes:
    """One front end's new tokens and ends, as an encoded `OutputBatch`.

    `image_causes`: by sequence, of those that an image has ended.
    """
    finished = output.finished
    rows = [(*_read_finish(row), image_causes.get(row.seq_id, "")) for row in finished]
    packed = pack_rows(rows) if rows else _NO_ROWS
    return output.frame(VERSION, OutputBatch.kind, packed)
