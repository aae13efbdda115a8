"""The engine core and a runner in one process, as the controller and rank 0 would have them over the bus."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from airside._core import Engine, EngineConfig, Request
from airside.controller.plan_message import output_frame, plan_frame
from airside.controller.vision.ledger import VisionLedger
from airside.proto.messages import OutputBatch, PixelsRef, StepPlan, decode
from airside.workers.model_runner import ModelRunner


@dataclass(slots=True)
class Outcome:
    """What came of some requests, by sequence id, and what the engine counted meanwhile."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    num_steps: int = 0
    num_preemptions: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class ReadyImage:
    """A picture whose pixels lie in a segment."""

    expansion: bytes  # i32
    pixels: PixelsRef


class _ReadyImages:
    """The part of the vision ledger that plans need."""

    def __init__(self, images: Mapping[int, list[ReadyImage]]) -> None:
        self._images = images

    def pixels(self, seq_id: int, image_index: int) -> tuple[PixelsRef, bytes]:
        return self._images[seq_id][image_index].pixels, b""


def run_engine(
    runner: ModelRunner,
    config: EngineConfig,
    requests: list[Request],
    images: Mapping[int, list[ReadyImage]] | None = None,
    engine: Engine | None = None,
) -> Outcome:
    """Runs requests to their ends; with `async_scheduling` each step is planned before the last is executed.

    Args:
        images: of sequences that have some.
        engine: goes on with this one, and what is cached there.
    """
    engine, outcome = engine or Engine(config), Outcome()
    ledger = cast(VisionLedger, _ReadyImages(images or {}))
    for request in requests:
        rejection = engine.add(request, 0.0)
        assert rejection is None, rejection.detail
    for seq_id, ready in (images or {}).items():
        for index, image in enumerate(ready):
            assert engine.set_shape(seq_id, index, image.expansion)
            assert engine.set_ready(seq_id, index)
    planned: deque[StepPlan] = deque()
    while True:
        while (plan := engine.schedule(0.0)) is not None:
            message = decode(plan_frame(plan, ledger))
            assert isinstance(message, StepPlan)
            planned.append(message)
        if not planned:
            break
        result = runner.execute(planned.popleft())
        assert result is not None
        engine.apply(
            result.step_id,
            result.sampled,
            0.0,
            logprobs=result.logprobs,
            prompt_logprobs=result.prompt_logprobs,
            num_drafts=result.num_drafts,
            draft_tokens=result.draft_tokens,
            draft_confidences=result.draft_confidences,
        )
        engine.check()
        _collect(engine, outcome)
    stats = engine.stats()
    outcome.num_steps, outcome.num_preemptions = stats.steps, stats.num_preemptions
    outcome.num_drafted, outcome.num_accepted = stats.draft_tokens, stats.accepted_tokens
    outcome.num_cached = stats.prefix_cache_hits
    return outcome


def _collect(engine: Engine, outcome: Outcome) -> None:
    for output in engine.take_outputs():
        batch = decode(output_frame(output))
        assert isinstance(batch, OutputBatch)
        for seq_id, tokens in batch.rows():
            outcome.tokens.setdefault(seq_id, []).extend(tokens)
        outcome.reasons |= {finish.seq_id: finish.reason for finish in batch.finished}
