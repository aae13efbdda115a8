"""What the controller says to others, and who does not take it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from airside.proto.channel import Hub
from airside.proto.messages import Message


class Post:
    """Sends over the bus. A peer that does not take a message is noted, and given up at the end of the turn.

    Args:
        hub: the bus.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._undelivered: dict[str, None] = {}  # in the order of their first message that was not taken

    def send(self, peer: str, message: Message, attachments: Sequence[memoryview] = ()) -> bool:
        """Sends a message; whether the peer takes it."""
        is_taken = self._hub.send(peer, message, attachments)
        if not is_taken:
            self._undelivered[peer] = None
        return is_taken

    def send_frame(self, peers: Iterable[str], frame: bytes, attachments: Sequence[memoryview] = ()) -> None:
        """Sends one encoded message to several peers."""
        for peer in peers:
            if not self._hub.send_frame(peer, frame, attachments):
                self._undelivered[peer] = None

    def last_word(self, peer: str, message: Message) -> None:
        """For one who does not count any more: it is no loss when it does not take the message."""
        self._hub.send(peer, message)

    def take_undelivered(self) -> list[str]:
        """Those who did not take a message since the last call."""
        if not self._undelivered:
            return []
        peers, self._undelivered = list(self._undelivered), {}
        return peers
