"""Real worker processes on a real bus, led by a few lines of controller."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from airside.proto.channel import Hub
from airside.proto.messages import Heartbeat, KvSetup, Message, Shutdown, StepPlan, StepResult, WorkerHello
from tests.workers.step_plans import Track, run_tracks, worker_settings

PATIENCE_S = 60.0


class Ranks:
    """A group of workers, said hello to and given `num_blocks` blocks."""

    def __init__(self, hub: Hub, processes: list[subprocess.Popen[str]]) -> None:
        self.hub = hub
        self.processes = processes
        self.names = [f"worker-{rank}" for rank in range(len(processes))]

    def wait_for(self, *kinds: type[Message]) -> tuple[str, Message]:
        """The next message of one of these kinds, and who sent it. Others, heartbeats apart, fail the test."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for envelope in self.hub.receive(200):
                if isinstance(envelope.message, kinds):
                    return envelope.peer, envelope.message
                assert isinstance(envelope.message, Heartbeat), envelope.message
        raise AssertionError(f"none of {[kind.__name__ for kind in kinds]} came")

    def send_all(self, message: Message, attachments: Sequence[memoryview] = ()) -> None:
        for name in self.names:
            assert self.hub.send(name, message, attachments)

    def set_up(self, num_blocks: int) -> list[WorkerHello]:
        hellos = []
        for _ in self.names:
            _, hello = self.wait_for(WorkerHello)
            assert isinstance(hello, WorkerHello)
            hellos.append(hello)
        self.send_all(KvSetup(num_blocks))
        return sorted(hellos, key=lambda hello: hello.rank)

    def step(self, plan: StepPlan) -> StepResult:
        """Sends a plan to every rank; what rank 0 answers."""
        self.send_all(plan)
        peer, result = self.wait_for(StepResult)
        assert isinstance(result, StepResult)
        assert (peer, result.step_id) == ("worker-0", plan.step_id)
        return result

    def generate(self, tracks: list[Track], chunk: int, num_tokens: int) -> list[list[int]]:
        """Runs all tracks together until each has made `num_tokens`."""
        return run_tracks(self.step, tracks, chunk, num_tokens)

    def shut_down(self) -> list[int]:
        """Exit statuses after a Shutdown."""
        self.send_all(Shutdown("the test is over"))
        return [process.wait(timeout=PATIENCE_S) for process in self.processes]


@contextmanager
def start_ranks(model_path: Path, run_folder: Path, world_size: int, **changes: object) -> Iterator[Ranks]:
    """Starts the ranks of one group; whatever happens, none outlives the block."""
    endpoint = f"ipc://{run_folder}/bus"
    with Hub(endpoint) as hub:
        processes = []
        for rank in range(world_size):
            settings = worker_settings(
                str(model_path),
                endpoint=endpoint,
                name=f"worker-{rank}",
                rank=rank,
                world_size=world_size,
                rendezvous=f"file://{run_folder}/rendezvous",
                **changes,
            )
            command = [sys.executable, "-m", "airside.workers", "--settings", settings.to_json()]
            processes.append(
                subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            )
        try:
            yield Ranks(hub, processes)
        finally:
            for process in processes:
                process.kill()
                process.communicate()
