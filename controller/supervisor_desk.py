"""What the controller and the supervisor ask of one another: how many vision workers there are, and whom to end."""

from __future__ import annotations

from collections.abc import Sequence

from airside.controller.peers import Peer
from airside.proto.messages import Message, PeerStuck, ScaleVision, ScaleVisionOutcome, VisionPool, VisionTarget
from airside.proto.settings import ControllerSettings


class SupervisorDesk:
    """Knows the supervisor, while there is one, and the vision workers that were asked for. Sends nothing itself.

    Args:
        settings: how many vision workers there are to be at first, and at most.
    """

    def __init__(self, settings: ControllerSettings) -> None:
        self.supervisor: str | None = None  # its bus name; None: nobody starts or ends processes
        self.vision_target = settings.vision_target
        self.vision_pending = ""  # why there are fewer than that
        self._replicas_max = settings.vision_replicas_max
        self._takes_images = settings.image_token_id is not None

    def join(self, name: str, stuck: Sequence[Peer]) -> list[Message]:
        """A supervisor has said hello. What it must be told: those who got stuck meanwhile are told again."""
        self.supervisor = name
        return [VisionTarget(self.vision_target), *(stuck_message(peer) for peer in stuck)]

    def leave(self) -> None:
        """The supervisor is lost."""
        self.supervisor = None

    def scale(self, request: ScaleVision) -> ScaleVisionOutcome:
        """Takes a new target, of which the supervisor must then be told, or says why not."""
        is_in_range = 0 <= request.replicas <= self._replicas_max
        refused = self._refusal(request.replicas, is_in_range)
        if not refused:
            self.vision_target = request.replicas
        return ScaleVisionOutcome(request.query_id, self.vision_target, refused, not is_in_range)

    def note_pool(self, pool: VisionPool) -> None:
        """What the supervisor aims at, which may be less than was asked for."""
        self.vision_target, self.vision_pending = pool.target, pool.pending

    def _refusal(self, replicas: int, is_in_range: bool) -> str:
        if not self._takes_images:
            return "this model takes no images"
        if not is_in_range:
            return f"replicas is {replicas}, but must be in [0, {self._replicas_max}] (vision.max_replicas)"
        if self.supervisor is None:
            return "no supervisor is running that could start or stop vision workers"
        return ""


def stuck_message(peer: Peer) -> PeerStuck:
    """For the supervisor, about a peer that was given up."""
    return PeerStuck(peer.name, peer.pid, peer.stuck_why)
