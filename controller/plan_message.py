"""Between the engine's values and the bus: plans on their way to the ranks, outputs on their way to the gateways."""

from __future__ import annotations

import dataclasses
import operator

from airside import _core
from airside.controller.vision_ledger import VisionLedger
from airside.proto.codec import encode_fields
from airside.proto.messages import FinishedRow, ImageRow, OpenedRow, OutputBatch, StepPlan

_PLAN_FIELDS, _OUTPUT_FIELDS, _OPENED_FIELDS, _FINISH_FIELDS = (
    [field.name for field in dataclasses.fields(cls)] for cls in (StepPlan, OutputBatch, OpenedRow, FinishedRow)
)
_PLAN_IMAGES, _PLAN_OPENED = map(_PLAN_FIELDS.index, ("images", "opened"))
_OUTPUT_FINISHED = _OUTPUT_FIELDS.index("finished")
_read_opened, _read_finish = operator.attrgetter(*_OPENED_FIELDS), operator.attrgetter(*_FINISH_FIELDS)


def plan_frame(plan: _core.StepPlan, ledger: VisionLedger) -> bytes:
    """The engine's plan as an encoded `StepPlan`, with the place of each image's pixels.

    Here and below the columns go into the frame as they are: a message in between would cost more than all the rest.
    """
    fields = plan.fields()
    if fields[_PLAN_IMAGES]:
        fields[_PLAN_IMAGES] = [
            ImageRow(seq_id, image_index, start, count, ledger.pixels(seq_id, image_index))
            for seq_id, image_index, start, count in plan.images
        ]
    if fields[_PLAN_OPENED]:
        fields[_PLAN_OPENED] = [_read_opened(row) for row in plan.opened]
    return encode_fields(StepPlan, fields)


def output_frame(output: _core.ClientOutput) -> bytes:
    """One front end's new tokens and ends, as an encoded `OutputBatch`."""
    fields = output.fields()
    if fields[_OUTPUT_FINISHED]:
        fields[_OUTPUT_FINISHED] = [_read_finish(row) for row in output.finished]
    return encode_fields(OutputBatch, fields)
