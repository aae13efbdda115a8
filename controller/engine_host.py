"""The engine core, and the launch of model workers that runs its steps.

    STARTING ──first whole group──> READY ──rank lost──> RECOVERING
                                      ^                      │
                                      └───next whole group───┘

The engine is made once, by the first whole group; it outlives every group, and with it every sequence.
"""

from __future__ import annotations

import logging
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
    """Keeps the engine, its current group of ranks, and the one step in flight. Knows no sockets and no clock."""

    def __init__(self, settings: ControllerSettings) -> None:
        self.engine: _core.Engine | None = None
        self.status = EngineStatus.STARTING
        self.detail = "waiting for the model workers"
        self.num_blocks = 0  # KV blocks of the engine; 0 before there is one
        self.step_id: int | None = None  # the step in flight
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
        return dict.fromkeys(self.ranks, "starting" if starting else "ready" if self.step_id is None else "busy")

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

    def set_up(self) -> KvSetup | None:
        """Makes the engine ready to step with a whole group; the message is for every rank.

        None: the group holds fewer KV blocks than the engine already counts on, and must be failed.
        """
        assert self._group is not None
        assert self._group.is_whole
        if self.engine is None:
            self.engine, self.num_blocks = make_engine(self._settings, self._group.num_blocks), self._group.num_blocks
        if self._group.num_blocks < self.num_blocks:
            return None
        self.status, self.detail = EngineStatus.READY, ""
        _log.info("engine_ready launch=%d num_blocks=%d", self._group.number, self.num_blocks)
        return KvSetup(self.num_blocks)

    def fail(self, why: str, now: float) -> list[str]:
        """The group is no more: all KV is lost, its sequences wait for the next launch. Returns the ranks it had."""
        if self._group is None:
            return []
        number, ranks = self._group.number, self._group.names
        _log.error("worker_group_lost launch=%d step_id=%s why=%s next=wait_for_launch", number, self.step_id, why)
        self._group, self._group_min = None, number + 1
        if self.engine is not None:
            self.engine.fail_step(now)
            self.status = EngineStatus.RECOVERING
        self.step_id, self.detail, self._is_explained = None, why, False
        return ranks

    # --- steps ----------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> _core.StepPlan | None:
        """The next step, in flight from now on; None while one is, without workers, or with nothing to compute."""
        if self.engine is None or self.status is not EngineStatus.READY or self.step_id is not None:
            return None
        plan = self.engine.schedule(now)
        if plan is not None:
            self.step_id = plan.step_id
        return plan

    def apply(self, peer: str, result: StepResult, now: float) -> bool:
        """Closes the step in flight. False: the result is of another step or another group, and changed nothing.

        Raises ValueError when the result does not fit the plan; the step is then still open.
        """
        if self.engine is None or self._group is None or peer != self._group.speaker or result.step_id != self.step_id:
            _log.debug("step_result_stale step_id=%d peer=%s", result.step_id, peer)
            return False
        self.engine.apply(result.step_id, result.sampled, now)
        self.step_id = None
        return True

    def explain(self, why: str) -> None:
        """Says why the engine has no workers, if it has none. The first to fail has the cause; others lost a peer."""
        if self.status is not EngineStatus.READY and not self._is_explained:
            self.detail, self._is_explained = why, True

    def close(self, now: float) -> None:
        """Gives up the step in flight, so that sequences aborted in it can end."""
        if self.engine is not None and self.step_id is not None:
            self.engine.fail_step(now)
            self.step_id = None
