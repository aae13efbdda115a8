"""Many streams at once against one server, timed as their client sees them."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from airside.cluster.bench.prompts import Prompts


class TargetError(RuntimeError):
    """The server cannot be measured; the message says what it answered."""


@dataclass(slots=True)
class StreamTimes:
    """One request: when it was sent, when each part of the answer came, when it ended; `perf_counter` seconds."""

    sent: float
    came: list[float] = field(default_factory=list)
    ended: float = 0.0
    num_tokens: int = 0
    """Of the output, as the server counts them, or as many as parts when it does not."""
    prompt_tokens: int | None = None
    """As the server counts them."""

    @property
    def first_s(self) -> float:
        """From sending to the first part."""
        return self.came[0] - self.sent

    @property
    def gaps_s(self) -> list[float]:
        """Between one part and the next; a part is one token unless the server sends several together."""
        return [after - before for before, after in itertools.pairwise(self.came)]


class Target(Protocol):
    """A server."""

    async def open(self) -> None:
        """Connects. Raises TargetError."""

    async def stream(self, prompt: list[int], num_tokens: int) -> StreamTimes:
        """One greedy request of exactly so many tokens. Raises TargetError."""

    async def close(self) -> None:
        """Disconnects."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one round of streams came to."""

    seconds: float
    streams: list[StreamTimes]

    @property
    def output_per_s(self) -> float:
        """Tokens of all outputs by the time of the round."""
        return sum(stream.num_tokens for stream in self.streams) / self.seconds


async def run_round(target: Target, prompts: Prompts, num_tokens: int, num_streams: int) -> Round:
    """Sends all prompts, `num_streams` at any time: each stream sends its next as soon as the one before has ended."""
    waiting = iter(prompts)

    async def one_stream() -> list[StreamTimes]:
        return [await target.stream(prompt, num_tokens) for prompt in waiting]

    gc.collect()
    gc.freeze()  # the collections of this process would count as gaps
    began = time.perf_counter()
    tasks = [asyncio.create_task(one_stream()) for _ in range(num_streams)]
    try:
        done = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        gc.unfreeze()
    return Round(time.perf_counter() - began, list(itertools.chain(*done)))


def gaps_of(streams: Sequence[StreamTimes]) -> list[float]:
    """Of all streams together."""
    return [gap for stream in streams for gap in stream.gaps_s]
