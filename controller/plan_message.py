"""Between the engine's values and the bus: plans on their way to the ranks, outputs on their way to the gateways."""

from __future__ import annotations

import dataclasses
import operator

from airside import _core
from airside.controller.vision_ledger import VisionLedger
from airside.proto.codec import encode_fields
from airside.proto.messages import FinishedRow, ImageRow, OpenedRow, OutputBatch, StepPlan


class _Columns:
    """Reads the fields of a message from a value of the engine that has them by the same names."""

    def __init__(self, cls: type) -> None:
        self._names = [field.name for field in dataclasses.fields(cls)]
        self._read = operator.attrgetter(*self._names)

    def read(self, value: object) -> list[object]:
        """All fields, in the message's order."""
        return list(self._read(value))

    def place(self, name: str) -> int:
        """Where a field is among them."""
        return self._names.index(name)


_PLAN, _OUTPUT, _OPENED, _FINISH = map(_Columns, (StepPlan, OutputBatch, OpenedRow, FinishedRow))
_PLAN_IMAGES, _PLAN_OPENED = _PLAN.place("images"), _PLAN.place("opened")
_OUTPUT_FINISHED = _OUTPUT.place("finished")


def plan_frame(plan: _core.StepPlan, ledger: VisionLedger) -> bytes:
    """The engine's plan as an encoded `StepPlan`, with the place of each image's pixels.

    Here and below the columns go into the frame as they are: a message in between would cost more than all the rest.
    """
    fields = _PLAN.read(plan)
    if fields[_PLAN_IMAGES]:
        fields[_PLAN_IMAGES] = [
            ImageRow(seq_id, image_index, start, count, ledger.pixels(seq_id, image_index))
            for seq_id, image_index, start, count in plan.images
        ]
    if fields[_PLAN_OPENED]:
        fields[_PLAN_OPENED] = [_OPENED.read(row) for row in plan.opened]
    return encode_fields(StepPlan, fields)


def output_frame(output: _core.ClientOutput) -> bytes:
    """One front end's new tokens and ends, as an encoded `OutputBatch`."""
    fields = _OUTPUT.read(output)
    if fields[_OUTPUT_FINISHED]:
        fields[_OUTPUT_FINISHED] = [_FINISH.read(row) for row in output.finished]
    return encode_fields(OutputBatch, fields)
