"""Between the engine's values and the bus: plans on their way to the ranks, outputs on their way to the gateways."""

from __future__ import annotations

from airside import _core
from airside.controller.vision_ledger import VisionLedger
from airside.proto.messages import FinishedRow, ImageRow, OutputBatch, StepPlan


def plan_message(plan: _core.StepPlan, ledger: VisionLedger) -> StepPlan:
    """The engine's plan, with the place of each image's pixels."""
    return StepPlan(
        step_id=plan.step_id,
        seq_ids=plan.seq_ids,
        num_computed=plan.num_computed,
        num_new=plan.num_new,
        token_ids=plan.token_ids,
        num_blocks=plan.num_blocks,
        block_tables=plan.block_tables,
        sampled=plan.sampled,
        temperature=plan.temperature,
        top_k=plan.top_k,
        top_p=plan.top_p,
        min_p=plan.min_p,
        seed=plan.seed,
        position=plan.position,
        banned=plan.banned,
        images=[
            ImageRow(seq_id, image_index, start, count, ledger.pixels(seq_id, image_index))
            for seq_id, image_index, start, count in plan.images
        ],
    )


def output_batch(output: _core.ClientOutput) -> OutputBatch:
    """One front end's new tokens and ends."""
    return OutputBatch(
        seq_ids=output.seq_ids,
        num_tokens=output.num_tokens,
        token_ids=output.token_ids,
        finished=[_finished_row(finish) for finish in output.finished],
    )


def _finished_row(finish: _core.Finish) -> FinishedRow:
    return FinishedRow(
        seq_id=finish.seq_id,
        reason=finish.reason,
        detail=finish.detail,
        prompt_tokens=finish.prompt_tokens,
        image_tokens=finish.image_tokens,
        completion_tokens=finish.completion_tokens,
        preemptions=finish.preemptions,
        queued_s=finish.queued_s,
        time_to_first_token_s=finish.time_to_first_token_s,
        decode_s=finish.decode_s,
    )
