"""The engine core, and the launch of model workers that runs its steps.

    STARTING ──first whole group──> READY ──rank lost──> RECOVERING
                                      ^                      │
                                      └───next whole group───┘

The engine is made once, by the first whole group; it outlives every group, and with it every sequence.
"""

from __future__ import annotations

import logging
from collections import deque
from enum import Enum

from airside import _core
from airside.controller.engine_setup import make_engine
from airside.controller.worker_group import WorkerGroup
from airside.proto.messages import EngineState, KvSetup, StepResult, WorkerHello
from airside.proto.settings import ControllerSettings

_log = logging.getLogger(__name__)


class EngineStatus(Enum):
    """Whether the engine has workers. The value is the state that gateways are told."""

    STARTING = "starting"
    READY = "ready"
    RECOVERING = "recovering"


class EngineHost:
    """Keeps the engine, its current group of ranks, and the steps in flight. Knows no sockets and no clock."""

    def __init__(self, settings: ControllerSettings) -> None:
        self.engine: _core.Engine | None = None
        self.status = EngineStatus.STARTING
        self.detail = "waiting for the model workers"
        self.num_blocks = 0  # KV blocks of the engine; 0 before there is one
        self.num_state_slots = 0  # the engine's; 0 for a model without fixed-size state
        self.speaker: str | None = None  # bus name of the rank that speaks for the group; None: no group is set up
        self._in_flight: deque[int] = deque()  # ids of steps that the ranks have, oldest first
        self._settings = settings
        self._group: WorkerGroup | None = None
        self._group_min = 0  # launches before this one are stale
        self._is_explained = False  # a rank has said why this launch failed; those that follow it down know less

    def state(self, vision_ready: bool) -> EngineState:
        """What gateways must know."""
        return EngineState(
            state=self.status.value,
            detail=self.detail,
            max_model_len=self._settings.max_model_len,
            kv_tokens_max=self.num_blocks * self._settings.block_size,
            vision_ready=vision_ready,
        )

    # --- the ranks ------------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> list[str]:
        """Bus names of the current group's ranks, as far as they are up."""
        return [] if self._group is None else self._group.names

    def rank_states(self) -> dict[str, str]:
        """ "starting", "ready" or "busy" by rank."""
        starting = self.status is not EngineStatus.READY
        return dict.fromkeys(self.ranks, "starting" if starting else "busy" if self._in_flight else "ready")

    def supersedes(self, hello: WorkerHello) -> bool:
        """Whether this hello means that the current group is no more: a newer launch, or a rank started anew."""
        group = self._group
        if group is None or hello.group < group.number:
            return False
        return hello.group > group.number or group.is_whole

    def refusal(self, hello: WorkerHello) -> str:
        """Why this rank cannot be taken; "" when it can."""
        world_size = self._settings.tensor_parallel_size
        if hello.group < self._group_min:
            return f"launch {hello.group} is stale, {self._group_min} is the next"
        if hello.world_size != world_size or not 0 <= hello.rank < world_size:
            return f"it is rank {hello.rank} of {hello.world_size}, the group has {world_size}"
        return ""

    def join(self, name: str, hello: WorkerHello) -> bool:
        """Takes a rank that `refusal` has nothing against. True: the group is whole, and `set_up` is due."""
        if self._group is None:
            self._group, self._group_min = WorkerGroup(hello.group, hello.world_size), hello.group
        self._group.add(name, hello)
        self._is_explained = False
        return self._group.is_whole

    def shortage(self) -> str:
        """What a whole group lacks of that which the engine counts on already; "" when it can be set up."""
        assert self._group is not None
        if self.engine is None:
            return ""
        if self._group.num_blocks < self.num_blocks:
            return f"it holds fewer than the {self.num_blocks} KV blocks that sequences count on"
        if self._group.num_state_slots < self.num_state_slots:
            return f"it holds fewer than the {self.num_state_slots} state slots that sequences count on"
        return ""

    def set_up(self) -> KvSetup:
        """Makes the engine ready to step with a whole group that lacks nothing; the message is for every rank."""
        assert self._group is not None
        assert self._group.is_whole
        if self.engine is None:
            self.num_blocks, self.num_state_slots = self._group.num_blocks, self._group.num_state_slots
            self.engine = make_engine(self._settings, self.num_blocks, self.num_state_slots)
        self.status, self.detail = EngineStatus.READY, ""
        self.speaker = self._group.speaker
        _log.info("engine_ready launch=%d num_blocks=%d", self._group.number, self.num_blocks)
        return KvSetup(self.num_blocks)

    def fail(self, why: str, now: float) -> list[str]:
        """The group is no more: all KV is lost, its sequences wait for the next launch. Returns the ranks it had."""
        if self._group is None:
            return []
        number, ranks, steps = self._group.number, self._group.names, list(self._in_flight)
        _log.error("worker_group_lost launch=%d steps=%s why=%s next=wait_for_launch", number, steps, why)
        self._group, self._group_min, self.speaker = None, number + 1, None
        if self.engine is not None:
            self.engine.fail_step(now)
            self.status = EngineStatus.RECOVERING
        self._in_flight.clear()
        self.detail, self._is_explained = why, False
        return ranks

    # --- steps ----------------------------------------------------------------------------------------------------

    @property
    def steps_in_flight(self) -> int:
        """Steps that the ranks have and that no result has closed."""
        return len(self._in_flight)

    def schedule(self, now: float) -> _core.StepPlan | None:
        """The next step, in flight from now on; None when there are enough, no workers, or nothing to compute."""
        if self.engine is None or self.speaker is None:
            return None
        plan = self.engine.schedule(now)
        if plan is not None:
            self._in_flight.append(plan.step_id)
        return plan

    def apply(self, peer: str, result: StepResult, now: float) -> bool:
        """Closes the oldest step in flight. False: the result is of a step or a group that is over; nothing changed.

        Raises ValueError when the result does not fit its plan, or passes an older one; no step is closed then.
        """
        if self.engine is None or peer != self.speaker or result.step_id not in self._in_flight:
            _log.debug("step_result_stale step_id=%d peer=%s", result.step_id, peer)
            return False
        if result.step_id != self._in_flight[0]:
            raise ValueError(f"it comes before that of step {self._in_flight[0]}")
        self.engine.apply(
            result.step_id,
            result.sampled,
            now,
            logprobs=result.logprobs,
            prompt_logprobs=result.prompt_logprobs,
            num_drafts=result.num_drafts,
            draft_tokens=result.draft_tokens,
            draft_confidences=result.draft_confidences,
        )
        self._in_flight.popleft()
        return True

    def explain(self, why: str) -> None:
        """Says why the engine has no workers, if it has none. The first to fail has the cause; others lost a peer."""
        if self.status is not EngineStatus.READY and not self._is_explained:
            self.detail, self._is_explained = why, True

    def close(self, now: float) -> None:
        """Gives up the steps in flight, so that sequences aborted in them can end."""
        if self.engine is not None and self._in_flight:
            self.engine.fail_step(now)
            self._in_flight.clear()
