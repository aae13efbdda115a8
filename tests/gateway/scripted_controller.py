"""The controller's end of the bus, in the hands of a test."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import TypeVar

import numpy as np

from airside.proto.channel import Hub
from airside.proto.messages import (
    Accepted,
    AddRequest,
    EngineState,
    FinishedRow,
    GatewayHello,
    Heartbeat,
    Message,
    OutputBatch,
    PeerRow,
    Peers,
    PeersQuery,
)

M = TypeVar("M", bound=Message)

WAIT_S = 20.0
MAX_MODEL_LEN = 100
READY = EngineState("ready", "", MAX_MODEL_LEN, 1000, vision_ready=True)


class ScriptedController:
    """Receives only while the test waits for something, and says only what the test tells it to.

    Hellos and heartbeats are noted; probes (queries with negative ids) are answered.
    """

    def __init__(self, endpoint: str, state: EngineState = READY) -> None:
        self.hub = Hub(endpoint)
        self.state = state
        self.gateways: list[str] = []
        self.heartbeats: list[Heartbeat] = []
        self.attachments: list[bytes] = []
        """Of the message that `expect` returned last."""
        self.sender = ""
        """Who sent that message."""

    def expect(self, kind: type[M]) -> M:
        """The next message of this kind; any other but hellos, heartbeats and probes is an error."""
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            message = self.poll(kind, timeout_ms=100)
            if message is not None:
                return message
        raise AssertionError(f"no {kind.__name__} came")

    def poll(self, kind: type[M], timeout_ms: int = 0) -> M | None:
        """The same, if it comes in time."""
        for envelope in self.hub.receive(timeout_ms):
            message, self.sender = envelope.message, envelope.peer
            noted = self._note(message)
            if isinstance(message, kind):
                self.attachments = [bytes(part) for part in envelope.attachments]
                return message
            assert noted, f"{message} came instead of {kind.__name__}"
        return None

    def send(self, message: Message, gateway: str | None = None) -> None:
        """To a gateway; to the one that spoke last when not named."""
        assert self.hub.send(gateway or self.sender, message)

    def accept(self) -> AddRequest:
        """Waits for a request and accepts it."""
        request = self.expect(AddRequest)
        self.send(Accepted(request.seq_id, queue_position=3))
        return request

    def _note(self, message: Message) -> bool:
        match message:
            case GatewayHello():
                self.gateways.append(self.sender)
                self.send(self.state)
            case Heartbeat():
                self.heartbeats.append(message)
            case PeersQuery(query_id=query_id) if query_id < 0:
                rows = [PeerRow("gateway", name, 0, "local", 1, "ready", 0.0, 0, 0) for name in self.gateways]
                self.send(Peers(query_id, rows, 0, ""))
            case _:
                return False
        return True


def batch(
    *rows: tuple[int, list[int]],
    finished: list[FinishedRow] | None = None,
    records: dict[int, bytes] | None = None,
    step_tokens: int = 0,
) -> OutputBatch:
    """New tokens by sequence, and the log-probability records of those that have some."""
    parts = [(records or {}).get(seq_id, b"") for seq_id, _ in rows]
    return OutputBatch(
        seq_ids=np.array([seq_id for seq_id, _ in rows], "<u8").tobytes(),
        num_tokens=np.array([len(ids) for _, ids in rows], "<i4").tobytes(),
        token_ids=np.array([i for _, ids in rows for i in ids], "<i4").tobytes(),
        finished=finished or [],
        step_tokens=step_tokens,
        logprob_sizes=np.array([len(part) for part in parts], "<i4").tobytes() if records else b"",
        logprobs=b"".join(parts),
    )


def record(logprob: float, *top: tuple[int, float], nextn: float = math.nan, confidence: float = math.nan) -> bytes:
    """A log-probability record with recognizable numbers; `top`: ids and log-probabilities of the alternatives."""
    head = np.array([logprob, logprob / 8, nextn, confidence], "<f4")
    ids = np.array([token_id for token_id, _ in top], "<i4")
    return head.tobytes() + ids.tobytes() + np.array([value for _, value in top], "<f4").tobytes()


def prompt_batch(seq_id: int, records: bytes) -> OutputBatch:
    """Log-probability records of the next tokens of a prompt."""
    return dataclasses.replace(
        batch(),
        prompt_seq_ids=np.array([seq_id], "<u8").tobytes(),
        prompt_sizes=np.array([len(records)], "<i4").tobytes(),
        prompt_logprobs=records,
    )


def finish(seq_id: int, reason: str = "stop", detail: str = "") -> FinishedRow:
    """An end with recognizable numbers. `reason`: the cause may follow, after a slash."""
    reason, _, cause = reason.partition("/")
    times = (0.125, 0.375, 0.625)
    return FinishedRow(seq_id, reason, detail, 11, 7, 3, 1, 0.25, 0.5, 0.75, 5, 9, 4, *times, "decode", cause)
