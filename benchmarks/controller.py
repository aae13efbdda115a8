"""What the controller itself takes for a step: `python benchmarks/controller.py`.

The real controller and engine, with real messages; in place of the sockets, a bus in memory whose model answers each
plan at once. Prints the median of each phase over the last 512 steps, in microseconds.
"""

# Arguments of the bus's methods are those of `Hub`.
# ruff: noqa: ARG002

from __future__ import annotations

import argparse
import struct
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from airside.controller.controller import Controller
from airside.controller.step_clock import PHASES, WINDOW_STEPS
from airside.proto import messages as msg
from airside.proto.channel import Envelope, Hub
from airside.proto.settings import ControllerSettings

STEPS = WINDOW_STEPS + 88
PROMPT_TOKENS = 16
WEIGHTS_BYTES = 64 * 2**20  # what a model reads in a step goes through the caches
BLOCK_SIZE = 16
GATEWAY, RANK = "gateway-0", "worker-0"


@dataclass(frozen=True, slots=True)
class Load:
    """Sequences that decode, and requests that wait behind them."""

    num_running: int
    num_waiting: int = 0


LOADS = [Load(1), Load(64), Load(256), Load(64, num_waiting=10_000)]


class MemoryBus(Hub):
    """A bus without sockets: one gateway that asks for `load`, and one rank whose model knows one token."""

    def __init__(self, load: Load, is_cold: bool) -> None:
        self._weights = np.ones(WEIGHTS_BYTES // 4 if is_cold else 1, np.float32)
        self.received, self.refused = Counter(), Counter()
        self.gauges: msg.Gauges | None = None
        self._inbox: deque[Envelope] = deque()
        self._plans: deque[bytes] = deque()
        self._steps_left = STEPS
        num_blocks = load.num_running * (2 + (PROMPT_TOKENS + STEPS) // BLOCK_SIZE)
        self._say(RANK, msg.WorkerHello(0, 1, 0, "here", 1, num_blocks, 0.0))
        self._say(GATEWAY, msg.GatewayHello("here", 2))
        for seq_id in range(load.num_running + load.num_waiting):
            self._say(GATEWAY, request(seq_id))

    def receive(self, timeout_ms: int) -> Iterator[Envelope]:
        """What was said since the last time, and the answer to the oldest plan."""
        if self._plans:
            self._answer(self._plans.popleft())
            self._weights.sum()
        while self._inbox:
            yield self._inbox.popleft()

    def send(self, peer: str, message: msg.Message, attachments: Sequence[memoryview] = ()) -> bool:
        """Encodes, as a real bus does; notes the gauges."""
        if isinstance(message, msg.Gauges):
            self.gauges = message
        msg.encode(message)
        return True

    def send_frame(self, peer: str, frame: bytes, attachments: Sequence[memoryview] = ()) -> bool:
        """Keeps a plan until it is computed."""
        if peer == RANK:
            self._plans.append(frame)
        return True

    def _answer(self, frame: bytes) -> None:
        plan = msg.decode(frame)
        assert isinstance(plan, msg.StepPlan)
        self._steps_left -= 1
        num_positions = sum(plan.sampled)
        self._say(RANK, msg.StepResult(plan.step_id, struct.pack("<i", 5) * num_positions, 0.0))
        if self._steps_left == 0:
            self._say(GATEWAY, msg.GaugesQuery(1))
            self._say("supervisor", msg.SupervisorHello("here", 3))
            self._say("supervisor", msg.Shutdown("enough"))

    def _say(self, peer: str, message: msg.Message) -> None:
        self._inbox.append(Envelope(peer, message, []))


def request(seq_id: int) -> msg.AddRequest:
    """A greedy request of its own prompt that does not end within the measurement."""
    return msg.AddRequest(
        seq_id=seq_id,
        request_id=str(seq_id),
        token_ids=struct.pack(f"<{PROMPT_TOKENS}i", *range(seq_id, seq_id + PROMPT_TOKENS)),
        image_positions=[],
        arrival=time.time(),
        priority=0,
        deadline=None,
        max_tokens=None,
        min_tokens=0,
        stop_token_ids=[2],
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=seq_id,
    )


def settings(load: Load, async_scheduling: bool) -> ControllerSettings:
    """Room for all that run, and for all that wait."""
    return ControllerSettings(
        endpoint="",
        block_size=BLOCK_SIZE,
        max_num_seqs=load.num_running,
        max_num_batched_tokens=2048,
        max_model_len=2048,
        tensor_parallel_size=1,
        enable_chunked_prefill=True,
        prefill_first=False,
        strict_fifo=False,
        preemption="recompute",
        max_queued_requests=100_000,
        max_queued_tokens=10_000_000,
        vision_target=0,
        vision_replicas_max=1,
        image_token_id=None,
        vocab_size=50_000,
        silence_timeout_s=3600,
        async_scheduling=async_scheduling,
    )


def measure(load: Load, is_cold: bool, async_scheduling: bool) -> msg.Gauges:
    """The controller's gauges at the end of a run."""
    bus = MemoryBus(load, is_cold)
    Controller(settings(load, async_scheduling), bus).run()
    assert bus.gauges is not None
    return bus.gauges


def main() -> int:
    """Prints a markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one-step", action="store_true", help="without async scheduling")
    parser.add_argument("--cold", action="store_true", help="with caches full of weights, as a model would leave them")
    arguments = parser.parse_args()
    print(f"| running | waiting | {' | '.join(PHASES)} | a step without send |")
    print("|---:" * (len(PHASES) + 3) + "|")
    for load in LOADS:
        gauges = measure(load, arguments.cold, not arguments.one_step)
        figures = [*(gauges.controller_phase_s[phase] for phase in PHASES), gauges.gauges["controller_step_s"]]
        print(f"| {load.num_running} | {load.num_waiting} | {' | '.join(f'{s * 1e6:.1f}' for s in figures)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
