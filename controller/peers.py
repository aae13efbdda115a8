"""Who is on the bus, and who has not been heard of for too long."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from enum import Enum

from airside.proto.messages import PeerRow

LOST_PEERS_MAX = 64
"""Lost peers that are remembered, so that an operator sees what went."""


class Role(Enum):
    """What a process is for. The value is its public name."""

    GATEWAY = "gateway"
    CONTROLLER = "controller"
    WORKER = "worker"
    VISION_WORKER = "vision_worker"
    SUPERVISOR = "supervisor"


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

    def get(self, name: str) -> Peer | None:
        """The last process of this name to say hello, lost or not."""
        return self._peers.get(name)

    def live(self, name: str) -> Peer | None:
        """The peer of this name, unless unknown or lost."""
        peer = self._peers.get(name)
        return None if peer is None or peer.lost else peer

    def lose(self, name: str) -> Peer | None:
        """Marks a peer as lost and returns it; None when it is unknown or was lost before."""
        peer = self.live(name)
        if peer is None:
            return None
        peer.lost = True
        lost = [other.name for other in self._peers.values() if other.lost]
        for oldest in lost[:-LOST_PEERS_MAX]:
            del self._peers[oldest]
        return peer

    def leave(self, name: str) -> None:
        """The process has said goodbye."""
        self._peers.pop(name, None)

    def silent(self, now: float, silence_max_s: float, excused: Container[str]) -> list[str]:
        """Live peers not heard of for too long. Those in `excused` may be silent now; their time starts later."""
        silent = []
        for peer in self._peers.values():
            if peer.name in excused:
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
                last_heard_s=now - peer.heard_at,
                jobs_done=jobs_done.get(peer.name, 0),
                rss_bytes=peer.rss_bytes,
            )
            for peer in self._peers.values()
        ]
