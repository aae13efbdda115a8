"""The numbers of `airside.v1.Gauges`, gathered from those who own them."""

from __future__ import annotations

from collections.abc import Mapping

from airside._core import Engine
from airside.controller.step_clock import StepClock
from airside.controller.vision_ledger import VisionLedger
from airside.proto.messages import Gauges


def gather_gauges(
    query_id: int, engine: Engine | None, ledger: VisionLedger, clock: StepClock, refused: Mapping[str, int]
) -> Gauges:
    """The answer to a `GaugesQuery`. Without an engine yet, its numbers are left out, which reads as 0."""
    gauges: dict[str, float] = {
        "vision_queue_depth": ledger.num_queued,
        "vision_workers": ledger.num_workers,
        "controller_step_s": clock.median_s,
    }
    stats = None if engine is None else engine.stats()
    if stats is not None:
        gauges |= {
            "num_requests_running": stats.num_running,
            "num_requests_waiting": stats.num_waiting,
            "kv_blocks_total": stats.blocks_total,
            "kv_blocks_live": stats.blocks_live,
            "kv_blocks_free": stats.blocks_free,
            "num_preemptions": stats.num_preemptions,
            "recomputed_tokens": stats.recomputed_tokens,
            "steps": stats.steps,
            "prompt_tokens": stats.prompt_tokens,
            "generation_tokens": stats.generation_tokens,
        }
    return Gauges(query_id, gauges, dict(stats.finished) if stats else {}, dict(refused))
