"""Scripted peers on a real bus: what the tests of the controller say, and what they hear."""

from __future__ import annotations

import itertools
import struct
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from airside.proto import messages as msg
from airside.proto.channel import Envelope, Link
from airside.proto.settings import ControllerSettings

PATIENCE_S = 10.0
IMAGE_TOKEN = 7
NUM_BLOCKS = 64

M = TypeVar("M", bound=msg.Message)
_pids = itertools.count(1000)


def controller_settings(endpoint: str, **changes: object) -> ControllerSettings:
    """Limits of a small engine that has one step in flight; `changes` go over them."""
    values: dict[str, object] = {
        "endpoint": endpoint,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 128,
        "tensor_parallel_size": 1,
        "enable_chunked_prefill": True,
        "prefill_first": False,
        "strict_fifo": False,
        "preemption": "recompute",
        "max_queued_requests": 16,
        "max_queued_tokens": 10_000,
        "vision_target": 0,
        "vision_replicas_max": 4,
        "image_token_id": IMAGE_TOKEN,
        "async_scheduling": False,
    }
    return ControllerSettings(**(values | changes))  # type: ignore[arg-type]


def i32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def read_i32(column: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(column) // 4}i", column))


def read_u64(column: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(column) // 8}Q", column))


class Peer:
    """One process of the bus; messages that a test does not wait for yet are kept."""

    def __init__(self, endpoint: str, name: str) -> None:
        self.name = name
        self.pid = next(_pids)
        self.link = Link(endpoint, name)
        self._inbox: deque[Envelope] = deque()

    def send(self, message: msg.Message, *attachments: bytes) -> None:
        self.link.send(message, attachments)

    def expect(self, kind: type[M], where: Callable[[M], bool] = lambda _: True) -> M:
        """The first message of this kind for which `where` holds; earlier ones of other kinds are kept."""
        envelope = self.expect_envelope(kind, where)
        assert isinstance(envelope.message, kind)
        return envelope.message

    def kept(self, kind: type[M]) -> list[M]:
        """Messages of this kind that came before those that were expected."""
        return [envelope.message for envelope in self._inbox if isinstance(envelope.message, kind)]

    def take(self, kind: type[M]) -> list[M]:
        """Messages of this kind that came before those that were expected; they are kept no longer."""
        taken = self.kept(kind)
        self._inbox = deque(envelope for envelope in self._inbox if not isinstance(envelope.message, kind))
        return taken

    def expect_envelope(self, kind: type[M], where: Callable[[M], bool] = lambda _: True) -> Envelope:
        passed: deque[Envelope] = deque()
        end = time.monotonic() + PATIENCE_S
        try:
            while True:
                envelope = self._inbox.popleft() if self._inbox else self.link.receive(50)
                if envelope is None:
                    if time.monotonic() > end:
                        kept = [type(e.message).__name__ for e in passed]
                        pytest.fail(f"{self.name} waited for {kind.__name__} in vain; it got {kept}")
                elif isinstance(envelope.message, kind) and where(envelope.message):
                    return envelope
                else:
                    passed.append(envelope)
        finally:
            self._inbox = passed + self._inbox

    def heard(self, kind: type[M]) -> list[M]:
        """All messages of this kind among those that have come by the time the controller answers a query."""
        self.send(msg.GaugesQuery(0xFFFF))
        self.expect(msg.Gauges, lambda gauges: gauges.query_id == 0xFFFF)
        return [e.message for e in self._inbox if isinstance(e.message, kind)]

    def close(self) -> None:
        self.link.close()


class Gateway(Peer):
    """A front end."""

    def __init__(self, endpoint: str, name: str) -> None:
        super().__init__(endpoint, name)
        self._tokens: defaultdict[int, list[int]] = defaultdict(list)
        self._ends: dict[int, msg.FinishedRow] = {}

    def hello(self) -> msg.EngineState:
        self.send(msg.GatewayHello("local", self.pid))
        return self.expect(msg.EngineState)

    def wait_ready(self, vision: bool = False) -> None:
        self.expect(msg.EngineState, lambda s: s.state == "ready" and s.vision_ready >= vision)

    def add(self, seq_id: int, prompt: tuple[int, ...] = (1, 2, 3), *images: bytes, **changes: object) -> None:
        values: dict[str, object] = {
            "seq_id": seq_id,
            "request_id": f"r{seq_id}",
            "token_ids": i32(*prompt),
            "image_positions": [at for at, token in enumerate(prompt) if token == IMAGE_TOKEN],
            "arrival": time.time(),
            "priority": 0,
            "deadline": None,
            "max_tokens": 4,
            "min_tokens": 0,
            "stop_token_ids": [],
            "temperature": 0.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "seed": 1,
        }
        self.send(msg.AddRequest(**(values | changes)), *images)  # type: ignore[arg-type]

    def accepted(self, seq_id: int) -> msg.Accepted:
        return self.expect(msg.Accepted, lambda accepted: accepted.seq_id == seq_id)

    def finish(self, seq_id: int) -> tuple[list[int], msg.FinishedRow]:
        """All tokens of a sequence, and its end."""
        while seq_id not in self._ends:
            batch = self.expect(msg.OutputBatch)
            for made_by, tokens in tokens_by_sequence(batch):
                self._tokens[made_by] += tokens
            for row in batch.finished:
                assert row.seq_id not in self._ends, "a second end"
                self._ends[row.seq_id] = row
        return self._tokens[seq_id], self._ends[seq_id]

    def has_finished(self, seq_id: int) -> bool:
        """Whether the end of a sequence has come."""
        self._keep(self.link.receive(0))
        return any(row.seq_id == seq_id for batch in self.kept(msg.OutputBatch) for row in batch.finished)

    def gauges(self) -> msg.Gauges:
        self.send(msg.GaugesQuery(1))
        return self.expect(msg.Gauges, lambda gauges: gauges.query_id == 1)

    def peers(self) -> dict[str, msg.PeerRow]:
        self.send(msg.PeersQuery(2))
        return {row.name: row for row in self.expect(msg.Peers).peers}

    def await_peer(self, name: str, state: str) -> None:
        """Asks until the controller lists the peer with this state."""
        end = time.monotonic() + PATIENCE_S
        while (row := self.peers().get(name)) is None or row.state != state:
            assert time.monotonic() < end, f"{name} is {row and row.state}, not {state}"
            self._keep(self.link.receive(20))

    def _keep(self, envelope: Envelope | None) -> None:
        if envelope is not None:
            self._inbox.append(envelope)


def tokens_by_sequence(batch: msg.OutputBatch) -> Iterator[tuple[int, list[int]]]:
    """The rows of a batch."""
    tokens, at = read_i32(batch.token_ids), 0
    for seq_id, count in zip(read_u64(batch.seq_ids), read_i32(batch.num_tokens), strict=True):
        yield seq_id, tokens[at : at + count]
        at += count


class Rank(Peer):
    """A model worker whose model says 1000, 1001, ... by output position."""

    def hello(
        self, rank: int = 0, world_size: int = 1, group: int = 0, num_blocks: int = NUM_BLOCKS, num_state_slots: int = 0
    ) -> None:
        self.send(msg.WorkerHello(rank, world_size, group, "local", self.pid, num_blocks, 0.1, num_state_slots))

    def set_up(self) -> msg.KvSetup:
        return self.expect(msg.KvSetup)

    def plan(self) -> msg.StepPlan:
        return self.expect(msg.StepPlan)

    def answer(self, plan: msg.StepPlan, **columns: bytes) -> None:
        """What the model makes of a plan; `columns` are those of the result beside its tokens."""
        firsts = struct.unpack(f"<{len(plan.position) // 8}q", plan.position)
        counts = [count for count in plan.sampled if count]
        sampled = [1000 + first + i for first, count in zip(firsts, counts, strict=True) for i in range(count)]
        self.send(msg.StepResult(plan.step_id, i32(*sampled), 0.001, **columns))

    def step(self) -> msg.StepPlan:
        plan = self.plan()
        self.answer(plan)
        return plan

    def step_until_end(self, gateway: Gateway, *seq_ids: int) -> None:
        """Answers every plan until these sequences have ended."""
        end = time.monotonic() + PATIENCE_S
        while not all(gateway.has_finished(seq_id) for seq_id in seq_ids):
            assert time.monotonic() < end, f"{seq_ids} do not end"
            envelope = self.link.receive(20)
            if envelope is not None:
                self._inbox.append(envelope)
            for plan in self.take(msg.StepPlan):
                self.answer(plan)


class VisionWorker(Peer):
    """A vision worker whose every image is three tokens long."""

    @property
    def segment(self) -> str:
        return f"airside-scripted-{self.pid}-{self.name}"

    def hello(self, credits: int = 1, segment_bytes: int = 0) -> None:
        self.send(msg.VisionHello("local", self.pid, self.segment, segment_bytes))
        self.send(msg.Credit(credits))

    def probe(self) -> msg.Probe:
        return self.expect(msg.Probe)

    def job(self) -> msg.Job:
        """The next job; probes that come before it are answered."""
        envelope = self.job_envelope()
        assert isinstance(envelope.message, msg.Job)
        return envelope.message

    def job_envelope(self) -> Envelope:
        end = time.monotonic() + PATIENCE_S
        while not self.kept(msg.Job):
            assert time.monotonic() < end, f"{self.name} waited for a job in vain"
            for probe in self.take(msg.Probe):
                self.shape(probe)
            envelope = self.link.receive(20)
            if envelope is not None:
                self._inbox.append(envelope)
        return self.expect_envelope(msg.Job)

    def shape(self, asked: msg.Probe | msg.Job, width: int = 30, height: int = 20) -> None:
        """The answer to a probe."""
        expansion = i32(*[IMAGE_TOKEN] * 3)
        self.send(msg.Shape(asked.seq_id, asked.image_index, asked.epoch, expansion, width, height))

    def pixels(self, job: msg.Job, slab: int = 0) -> msg.PixelsRef:
        """A job's last word but its credit."""
        ref = msg.PixelsRef(self.segment, slab, 64, [msg.TensorRef("pixel_values", "float32", [4, 4], 0)])
        self.send(msg.Pixels(job.seq_id, job.image_index, job.epoch, ref, 0.125, 0.5))
        return ref
