"""Frames that the engine writes itself: read back, they are the messages that they stand for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from airside import _core
from airside.controller.plan_message import output_frame, plan_frame
from airside.controller.vision.ledger import VisionLedger
from airside.proto.codec import decode
from airside.proto.logprob_record import record_bytes
from airside.proto.messages import OpenedRow, OutputBatch, PromptLogprobRow, StepPlan
from tests.engine.columns import i32
from tests.engine.driver import Driver

PROMPT = [20, 21, 22, 23, 24]


def named(value: object, cls: type, *but: str) -> dict[str, object]:
    names = [field.name for field in dataclasses.fields(cls) if field.name not in but]
    return {name: getattr(value, name) for name in names}


def frame_of(plan: _core.StepPlan) -> StepPlan:
    message = decode(plan_frame(plan, VisionLedger()))
    assert isinstance(message, StepPlan)
    return message


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"presence_penalty": 0.5, "logit_bias": {3: -2.0, 70_000: 1.0}},
        {"logprobs": 1, "prompt_logprobs": 0},
        {"min_tokens": 2, "stop_token_ids": list(range(20)), "seed": 2**64 - 1},
    ],
)
@pytest.mark.parametrize("num_seqs", [1, 40])
def test_a_plan(options: dict[str, Any], num_seqs: int) -> None:  # Any: fields of Request
    """Every column, rules and prompt rows; forty rows need the wider headers."""
    driver = Driver(async_scheduling=True, tail_tokens=2, max_num_seqs=64, num_blocks=200, vocab_size=None)
    for seq_id in range(num_seqs):
        driver.add(2**40 + seq_id, PROMPT, max_tokens=3, **options)
    assert driver.schedule()
    plan = driver.flights[-1]
    message = frame_of(plan)
    rows = ("images", "opened", "prompt_logprobs")
    assert named(message, StepPlan, *rows) == named(plan, StepPlan, *rows)
    assert message.images == []
    assert message.prompt_logprobs == [PromptLogprobRow(*row) for row in plan.prompt_logprobs]
    assert [named(row, OpenedRow) for row in message.opened] == [named(row, OpenedRow) for row in plan.opened]
    assert bool(message.opened) == ("logit_bias" in options)
    assert bool(message.prompt_logprobs) == ("prompt_logprobs" in options)
    assert plan.is_plain == (not message.opened and not message.prompt_logprobs)


def test_an_output() -> None:
    driver = Driver(async_scheduling=False)
    driver.add(1, PROMPT, max_tokens=3, logprobs=1, prompt_logprobs=0)
    assert driver.schedule()
    engine = driver.engine
    records = {"logprobs": bytes(record_bytes(1)), "prompt_logprobs": bytes(4 * record_bytes(0))}
    engine.apply(driver.flights[-1].step_id, i32([8]), 0.0, **records)
    engine.abort(1, "enough")
    (output,) = engine.take_outputs()
    message = decode(output_frame(output, {1: "truncated", 2: "another's"}))
    assert isinstance(message, OutputBatch)
    assert named(message, OutputBatch, "finished") == named(output, OutputBatch, "finished")
    (row,) = message.finished
    assert named(row, type(row), "image_cause") == named(output.finished[0], type(row), "image_cause")
    assert row.image_cause == "truncated"
