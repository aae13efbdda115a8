"""Who is on the bus, and who has not been heard of for too long."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from enum import Enum

from airside.proto import messages as msg
from airside.proto.messages import Message, PeerRow

LOST_PEERS_MAX = 64
"""Lost peers that are remembered, so that an operator sees what went."""


class Role(Enum):
    """What a process is for. The value is its public name."""

    GATEWAY = "gateway"
    CONTROLLER = "controller"
    WORKER = "worker"
    VISION_WORKER = "vision_worker"
    SUPERVISOR = "supervisor"


SPOKEN_BY: dict[type[Message], Role] = {
    msg.AbortSequence: Role.GATEWAY,
    msg.AbortByName: Role.GATEWAY,
    msg.ScaleVision: Role.GATEWAY,
    msg.StopSequence: Role.GATEWAY,
    msg.CountImages: Role.GATEWAY,
    msg.StepResult: Role.WORKER,
    msg.GrammarReady: Role.WORKER,
    msg.GrammarFailed: Role.WORKER,
    msg.WorkerFailed: Role.WORKER,
    msg.Credit: Role.VISION_WORKER,
    msg.Fetched: Role.VISION_WORKER,
    msg.Shape: Role.VISION_WORKER,
    msg.Pixels: Role.VISION_WORKER,
    msg.ImageFailed: Role.VISION_WORKER,
    msg.ArenaFull: Role.VISION_WORKER,
    msg.Goodbye: Role.VISION_WORKER,
    msg.PeerLost: Role.SUPERVISOR,
    msg.VisionPool: Role.SUPERVISOR,
    msg.DrainVision: Role.SUPERVISOR,
    msg.Shutdown: Role.SUPERVISOR,
}
"""Who may say what. Anybody may ask, and say hello."""

FIRST_MESSAGES = (msg.GatewayHello, msg.WorkerHello, msg.VisionHello, msg.SupervisorHello, msg.WorkerFailed)
"""What one says who is not known, or counts as lost. A rank that could not load its weights has said no hello."""


@dataclass(slots=True)
class Peer:
    """One process that has said hello."""

    role: Role
    name: str
    rank: int
    node: str
    pid: int
    heard_at: float
    quiet_since: float  # heard_at, or later when silence was excused until then
    lost: bool = False
    stuck_why: str = ""  # lost while its process may live on
    rss_bytes: int = 0


class Peers:
    """All processes that have said hello. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._peers: dict[str, Peer] = {}

    def join(self, role: Role, name: str, node: str, pid: int, now: float, rank: int = 0) -> None:
        """A process has said hello; an earlier one of the same name is forgotten."""
        self._peers.pop(name, None)
        self._peers[name] = Peer(role, name, rank, node, pid, heard_at=now, quiet_since=now)

    def heard(self, name: str, now: float) -> bool:
        """Notes a sign of life. False when the peer counts as lost: that is final until it says hello again."""
        peer = self._peers.get(name)
        if peer is None:
            return True
        peer.heard_at = peer.quiet_since = now
        return not peer.lost

    def set_rss(self, name: str, rss_bytes: int) -> None:
        """Notes a peer's resident memory."""
        peer = self._peers.get(name)
        if peer is not None:
            peer.rss_bytes = rss_bytes

    def may_say(self, name: str, message: Message) -> bool:
        """Whether the process of this name has said hello as one whose word this is.

        Nobody may who has a name that would break lines of logs and lists.
        """
        if not name.isprintable():
            return False
        peer, role = self._peers.get(name), SPOKEN_BY.get(type(message))
        if peer is None:
            return role is None or isinstance(message, FIRST_MESSAGES)
        return peer.role is not Role.CONTROLLER and role in (None, peer.role)

    def get(self, name: str) -> Peer | None:
        """The last process of this name to say hello, lost or not."""
        return self._peers.get(name)

    def live(self, name: str) -> Peer | None:
        """The peer of this name, unless unknown or lost."""
        peer = self._peers.get(name)
        return None if peer is None or peer.lost else peer

    def lose(self, name: str) -> Peer | None:
        """Marks a peer as lost and returns it; None when it is unknown, was lost before, or is ourselves."""
        peer = self.live(name)
        if peer is None or peer.role is Role.CONTROLLER:
            return None
        peer.lost = True
        lost = [other.name for other in self._peers.values() if other.lost]
        for oldest in lost[:-LOST_PEERS_MAX]:
            del self._peers[oldest]
        return peer

    def stuck(self) -> list[Peer]:
        """Lost ones whose processes may live on."""
        return [peer for peer in self._peers.values() if peer.lost and peer.stuck_why]

    def leave(self, name: str) -> None:
        """The process has said goodbye."""
        self._peers.pop(name, None)

    def silent(self, now: float, silence_max_s: float, excused: Container[str]) -> list[str]:
        """Live peers not heard of for too long. Those in `excused` may be silent now; their time starts later."""
        silent = []
        for peer in self._peers.values():
            if peer.name in excused or peer.role is Role.CONTROLLER:
                peer.quiet_since = now
            elif not peer.lost and now - peer.quiet_since > silence_max_s:
                silent.append(peer.name)
        return silent

    def rows(self, now: float, states: Mapping[str, str], jobs_done: Mapping[str, int]) -> list[PeerRow]:
        """One row per peer, in order of their hellos. Peers that `states` does not name are "ready"."""
        return [
            PeerRow(
                role=peer.role.value,
                name=peer.name,
                rank=peer.rank,
                node=peer.node,
                pid=peer.pid,
                state="lost" if peer.lost else states.get(peer.name, "ready"),
                last_heard_s=0.0 if peer.role is Role.CONTROLLER else now - peer.heard_at,
                jobs_done=jobs_done.get(peer.name, 0),
                rss_bytes=peer.rss_bytes,
            )
            for peer in self._peers.values()
        ]
