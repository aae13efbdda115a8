"""Streams of text, timed as their client sees them."""

from __future__ import annotations

import itertools
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc

from airside.proto import airside_pb2 as pb
from airside.proto.airside_pb2_grpc import InferenceStub
from airside.proto.garbage import keep_what_is_loaded

ORDINARY_TOKEN_IDS = range(1000, 40_000)  # no special tokens among them
PROMPT_TOKENS = 4  # all streams' together are fewer than a picture has
OUTPUT_TOKENS = 32


@dataclass(slots=True)
class TextTimes:
    """Seconds, in no order. The plain ones are those whose step computed no more than texts like these have."""

    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    plain_first_s: list[float] = field(default_factory=list)
    plain_gaps_s: list[float] = field(default_factory=list)

    def add(self, other: TextTimes) -> None:
        """Takes another's samples too."""
        self.first_s += other.first_s
        self.gaps_s += other.gaps_s
        self.plain_first_s += other.plain_first_s
        self.plain_gaps_s += other.plain_gaps_s


def measure_texts(address: str, num_streams: int, seconds: float) -> TextTimes:
    """Keeps so many streams going for so long; each sends its next request as soon as the one before has ended.

    Raises:
        grpc.RpcError: a request failed.
    """
    keep_what_is_loaded()  # this process's collections would count as gaps
    until = time.monotonic() + seconds
    with grpc.insecure_channel(address) as channel, ThreadPoolExecutor(num_streams) as pool:
        streams = [
            pool.submit(_stream, InferenceStub(channel), until, PROMPT_TOKENS * num_streams, seed)
            for seed in range(num_streams)
        ]
        times = TextTimes()
        for stream in streams:
            times.add(stream.result())
    return times


def _stream(stub: InferenceStub, until: float, plain_tokens_max: int, seed: int) -> TextTimes:
    chosen, times = random.Random(seed), TextTimes()
    while time.monotonic() < until:
        _time_one(stub, chosen.choices(ORDINARY_TOKEN_IDS, k=PROMPT_TOKENS), plain_tokens_max, times)
    return times


def _time_one(stub: InferenceStub, prompt: list[int], plain_tokens_max: int, times: TextTimes) -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt),
        sampling=pb.Sampling(temperature=0),
        stop=pb.Stop(max_tokens=OUTPUT_TOKENS, ignore_eos=True),
    )
    began = time.perf_counter()
    came: list[tuple[float, bool]] = []
    for event in stub.Generate(request):
        if event.HasField("delta") and event.delta.token_ids:
            came.append((time.perf_counter(), event.delta.step_tokens <= plain_tokens_max))
    first_at, is_plain = came[0]
    times.first_s.append(first_at - began)
    if is_plain:
        times.plain_first_s.append(first_at - began)
    for (before, _), (after, is_plain) in itertools.pairwise(came):
        times.gaps_s.append(after - before)
        if is_plain:
            times.plain_gaps_s.append(after - before)
