"""What the controller and the supervisor ask of one another: how many vision workers there are, and whom to end."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from airside.controller.peers import Peer
from airside.controller.vision.ledger import VisionLedger
from airside.proto.messages import (
    Message,
    PeerStuck,
    ScaleVision,
    ScaleVisionOutcome,
    VisionLoad,
    VisionPool,
    VisionTarget,
)
from airside.proto.settings import ControllerSettings

_LOAD_EVERY_S = 0.45  # a little less than the longest turn of the controller's loop, so that each such turn tells


class SupervisorDesk:
    """Knows the supervisor, while there is one, and the vision workers that were asked for. Sends nothing itself.

    Args:
        settings: how many vision workers there are to be at first, and at most.
        images: knows the load of the vision workers.
    """

    def __init__(self, settings: ControllerSettings, images: VisionLedger) -> None:
        self.supervisor: str | None = None  # its bus name; None: nobody starts or ends processes
        self.vision_target = settings.vision_target
        self.vision_pending = ""  # why there are fewer than that
        self.vision_scale_events: dict[str, int] = {}  # changes of the target, by "up_load", "down_asked", ...
        self.vision_restarts: dict[str, int] = {}  # those that others took the place of, by why
        self._asked: VisionTarget | None = None  # the last that this controller was asked for
        self._images = images
        self._replicas_max = settings.vision_replicas_max
        self._takes_images = settings.image_token_id is not None
        self._starts_on_demand = False  # none are wanted while there is nothing to do
        self._next_load = 0.0
        self._need_told = False  # that something waits and nobody works
        self._jobs_done: dict[str, int] = {}  # by vision worker, when the load was last told

    def join(self, name: str, stuck: Sequence[Peer]) -> list[Message]:
        """A supervisor has said hello. What it must be told again: what was asked for, and those who got stuck."""
        self.supervisor = name
        self._next_load = 0.0
        asked = [] if self._asked is None else [self._asked]
        return [*asked, *(stuck_message(peer) for peer in stuck)]

    def leave(self) -> None:
        """The supervisor is lost."""
        self.supervisor = None

    # --- how many vision workers ----------------------------------------------------------------------------------

    def scale(self, request: ScaleVision) -> tuple[ScaleVisionOutcome, VisionTarget | None]:
        """The answer, and what the supervisor must be told; None when the request is refused."""
        fewest, most = request.replicas, request.replicas if request.replicas_max is None else request.replicas_max
        is_in_range = 0 <= fewest <= most <= self._replicas_max
        refused = self._refusal(request, is_in_range)
        if refused:
            return ScaleVisionOutcome(request.query_id, self.vision_target, refused, not is_in_range), None
        self.vision_target = max(fewest, min(self.vision_target, most))
        self._asked = VisionTarget(request.replicas, request.replicas_max)
        return ScaleVisionOutcome(request.query_id, fewest, "", replicas_max=request.replicas_max), self._asked

    def note_pool(self, pool: VisionPool) -> None:
        """What the supervisor aims at, which may be less than was asked for."""
        self.vision_target, self.vision_pending = pool.target, pool.pending
        self.vision_scale_events, self.vision_restarts = pool.scale_events, pool.restarts
        self._starts_on_demand = pool.fewest == 0 < pool.most

    @property
    def vision_ready(self) -> bool:
        """Whether images are served: by vision workers, or by those that are started as soon as there is something."""
        if self._images.num_workers:
            return True
        return self.supervisor is not None and self._starts_on_demand and not self.vision_pending

    def take_load(self, now: float) -> VisionLoad | None:
        """The load, when the supervisor is to be told: twice a second, and as soon as something waits for nobody."""
        if self.supervisor is None or not self._takes_images:
            return None
        is_due = now >= self._next_load
        if not is_due and (self._images.num_workers or self._need_told):
            return None
        load = self._images.load(now)
        is_needed = load.queued > 0 and not load.workers
        if not is_due and not is_needed:
            return None
        self._next_load, self._need_told = now + _LOAD_EVERY_S, is_needed
        before, self._jobs_done = self._jobs_done, self._images.jobs_done()
        done = sum(max(0, jobs - before.get(name, 0)) for name, jobs in self._jobs_done.items())
        return dataclasses.replace(load, done=done)

    def _refusal(self, request: ScaleVision, is_in_range: bool) -> str:
        if not self._takes_images:
            return "this model takes no images"
        if not is_in_range:
            most = f"[0, {self._replicas_max}] (vision.autoscaling_config.max_replicas)"
            if request.replicas_max is None:
                return f"replicas is {request.replicas}, but must be in {most}"
            return f"range is {request.replicas} to {request.replicas_max}, but must be rising and in {most}"
        if self.supervisor is None:
            return "no supervisor is running that could start or stop vision workers"
        return ""


def stuck_message(peer: Peer) -> PeerStuck:
    """For the supervisor, about a peer that was given up."""
    return PeerStuck(peer.name, peer.pid, peer.stuck_why)
