"""Request ids and deadlines of the live sequences, and the ids of those that ended lately."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass

ENDED_IDS_MAX = 8192
"""Request ids of ended sequences that are remembered, to tell "already finished" from "unknown"."""

DEADLINES_IDLE_MAX = 1024
"""Deadlines of ended sequences that are kept until they are met."""


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """What the controller itself must know of a live sequence."""

    seq_id: int
    request_id: str  # of several sequences, when they are the continuations of one request
    client: int
    arrival: float  # unix time of the call


class LiveRequests:
    """Live sequences by id and by name, with their deadlines (unix time)."""

    def __init__(self) -> None:
        self._by_seq: dict[int, LiveRequest] = {}
        self._by_name: dict[str, list[LiveRequest]] = {}
        self._deadlines: list[tuple[float, int]] = []  # a heap; entries of ended sequences go when met, or are swept
        self._ended: OrderedDict[str, None] = OrderedDict()

    def add(self, request: LiveRequest, deadline: float | None) -> None:
        """A sequence was accepted."""
        assert request.seq_id not in self._by_seq, request
        assert self.may_share(request.request_id, request.client, request.arrival), request
        self._by_seq[request.seq_id] = request
        self._by_name.setdefault(request.request_id, []).append(request)
        if deadline is not None:
            heapq.heappush(self._deadlines, (deadline, request.seq_id))
            self._sweep_deadlines()

    def end(self, seq_id: int) -> None:
        """A sequence has ended."""
        request = self._by_seq.pop(seq_id)
        same_name = self._by_name[request.request_id]
        same_name.remove(request)
        if same_name:
            return
        del self._by_name[request.request_id]
        self._ended[request.request_id] = None
        self._ended.move_to_end(request.request_id)
        if len(self._ended) > ENDED_IDS_MAX:
            self._ended.popitem(last=False)

    def get(self, seq_id: int) -> LiveRequest | None:
        """The live sequence of this id."""
        return self._by_seq.get(seq_id)

    def may_share(self, request_id: str, client: int, arrival: float) -> bool:
        """Whether a sequence may have this request id: nobody does, or only other continuations of the same call.

        Those come from the same front end with the very same time of arrival; another call has another one.
        """
        live = self._by_name.get(request_id, ())
        return all(other.client == client and other.arrival == arrival for other in live)

    def of_name(self, request_id: str) -> list[int]:
        """The live sequences of this request id, oldest first."""
        return [request.seq_id for request in self._by_name.get(request_id, ())]

    def has_ended(self, request_id: str) -> bool:
        """Whether a request of this id ended, with all its sequences, not long ago."""
        return request_id in self._ended

    def of_client(self, client: int) -> list[int]:
        """Live sequences of one front end, oldest first."""
        return [request.seq_id for request in self._by_seq.values() if request.client == client]

    def seq_ids(self) -> list[int]:
        """All live sequences, oldest first."""
        return list(self._by_seq)

    def _sweep_deadlines(self) -> None:
        """Keeps far deadlines of sequences that ended long before them from piling up."""
        if len(self._deadlines) > 2 * len(self._by_seq) + DEADLINES_IDLE_MAX:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._by_seq]
            heapq.heapify(self._deadlines)

    def next_deadline(self) -> float | None:
        """The earliest deadline of a live sequence."""
        while self._deadlines and self._deadlines[0][1] not in self._by_seq:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def pop_expired(self, now: float) -> list[int]:
        """Live sequences whose deadline has passed, each told once."""
        expired = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            expired.append(heapq.heappop(self._deadlines)[1])
        return expired
